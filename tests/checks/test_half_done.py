# SPDX-License-Identifier: LGPL-2.1-or-later
"""How much of each identity a stopped CPU may have left half done, and where."""

from __future__ import annotations

import pytest
from support.made import LIMITS, OBJCG_A, ROOT, A, B, snapshot

from memcg_inspect.checks.half_done import (
    CGROUP,
    LRU,
    PAGES,
    PERCPU,
    SLAB,
    SOCK,
    STACK,
    VMALLOC,
    pattern,
    slab_amounts,
)
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Held, HeldKind, ObjStock, Running, Unit
from memcg_inspect.model_freeing import Transient
from memcg_inspect.report import Row

PAGE = 4096
BATCH, FOLIOS, BLOCK = LIMITS.charge_batch, LIMITS.folio_batch, LIMITS.block
OBJECT = LIMITS.slab_object + LIMITS.slab_stock
KMEM = -(-(LIMITS.percpu + LIMITS.slab_stock) // PAGE)

#: What a CPU has of a counter of a node, and half of a threshold.
DIFF = 192

#: One function of each identity that makes charges of it, the unit of its rows, and the most that
#: one CPU in that function leaves half done. The CPU's stack points to a memcg, and to no pages.
BOUNDS: dict[str, tuple[str, Unit, int]] = {
    "slab": ("__memcg_slab_post_alloc_hook", "bytes", OBJECT),
    "percpu": ("pcpu_alloc_noprof", "bytes", LIMITS.percpu),
    "kernel_stack": ("dup_task_struct", "KiB", LIMITS.stack // 1024),
    "pagetable": ("pagetable_pte_ctor", "pages", 2),
    "vmalloc": ("__vmalloc_area_node", "pages", BLOCK),
    "kmem": ("obj_cgroup_charge_pages", "pages", KMEM),
    "objcg_bytes": ("refill_obj_stock", "bytes", PAGE // 2),
    "zswap": ("zswap_store", "bytes", PAGE),
    "sock": ("tcp_sendmsg", "pages", BATCH),
    "sock_bytes": ("tcp_sendmsg", "references", 1),
    "usage": ("try_charge_memcg", "pages", BATCH + FOLIOS),
    "swap": ("__mem_cgroup_try_charge_swap", "pages", BLOCK),
    "swap_usage": ("__mem_cgroup_try_charge_swap", "pages", BATCH + FOLIOS),
    "kmem_usage": ("obj_cgroup_charge_pages", "pages", KMEM),
    "tcpmem": ("tcp_sendmsg", "pages", BATCH),
    "lru": ("folio_batch_move_lru", "pages", FOLIOS + 1),
    "user_pages": ("folio_add_new_anon_rmap", "pages", FOLIOS + 1),
    "levels": ("__mod_objcg_mlstate_kmem_cache", "bytes", OBJECT),
    "page_levels": ("__mod_memcg_lruvec_state", "pages", BLOCK),
    "node_slab": ("allocate_slab", "pages", BLOCK),
    "node_stack": ("dup_task_struct", "KiB", LIMITS.stack // 1024),
    "node_pagetable": ("pagetable_pte_ctor", "pages", 2),
    "node_vmalloc": ("__vmalloc_area_node", "pages", BLOCK),
    "node_levels": ("__mod_lruvec_state", "pages", BLOCK),
    "node_totals": ("mod_node_page_state", "pages", BLOCK + DIFF),
    "zone_free": ("__mod_zone_page_state", "pages", BLOCK + DIFF),
    "zone_zspages": ("zs_malloc", "pages", 32),
    "zone_mlock": ("mlock_folio", "pages", BLOCK),
    "zone_lru": ("folio_batch_move_lru", "pages", FOLIOS + 1),
    "zone_totals": ("mod_zone_page_state", "pages", BLOCK + DIFF),
    "references": ("obj_cgroup_release", "references", FOLIOS + 1),
    "objcg_sets": ("obj_cgroup_release", "references", 1),
    "reparenting": ("mem_cgroup_css_offline", "references", 1),
    "alloc_tags": ("__alloc_frozen_pages_noprof", "references", BLOCK),
    "hierarchy": ("obj_cgroup_charge_pages", "pages", KMEM),
}
#: Identities of rows that nothing leaves half done.
WHOLE = {"zone_free_area", "placement", "released", "task_objcg", "active_memcg", "cached_stacks"}
#: Kinds of what shows in the rows of each identity while it is charged: pages in most of them.
OF_PAGES = {"kmem", "folio", "batch"}
OF_OBJECTS = {"object", "cache", "zswap", "percpu"}
SHOWN: dict[str, set[str]] = {
    **dict.fromkeys(("pagetable", "vmalloc", "user_pages", "node_slab"), OF_PAGES),
    **dict.fromkeys(("page_levels", "node_levels", "node_totals", "zone_totals"), OF_PAGES),
    "slab": {"object", "cache", "kmem"},
    "levels": {"object", "cache", "kmem"},
    "percpu": {"percpu"},
    "kmem": OF_OBJECTS | OF_PAGES,
    "usage": OF_OBJECTS | OF_PAGES,
    "lru": {"folio"},
    "zone_lru": {"folio"},
    "sock": set(),
    "references": OF_PAGES | OF_OBJECTS - {"zswap"},
}
#: Those whose counters are charged before a charge has an owner, and uncharged afterwards.
OWNED_LATER = {"slab", "levels", "kmem", "usage", "references"}
#: A function that charges nothing.
ELSEWHERE = "osq_lock"
#: A CPU points to the memcg of the rows, and not to what is charged.
ITS_MEMCG = (Held("memcg", A, A),)


def cpu(
    function: str, number: int = 0, held: tuple[Held, ...] | None = ITS_MEMCG, frames: int = 3
) -> Running:
    functions = (function, *["do_syscall_64"] * frames)[:frames]
    return Running(number, 7, "sh", functions, True, held)


def pages(number: int) -> tuple[Held, ...]:
    return (*ITS_MEMCG, Held("folio", 0xE000, 0, 0, number * PAGE))


def rows_off(identity: str, unit: Unit, *differences: int, memcg: int = A) -> list[Row]:
    """A row of ``/a`` for each difference."""
    return [
        make_row(RowKey(identity, f"ITEM{n}", unit, memcg), {"x": 0}, {"y": difference})
        for n, difference in enumerate(differences)
    ]


def marked(rows: list[Row], *cpus: Running, **more: object) -> list[str]:
    taken = snapshot(running=cpus, **more)
    return [row.status for row in mark_in_flight(taken, rows)]


def status(identity: str, unit: Unit, difference: int, *cpus: Running) -> str:
    [found] = marked(rows_off(identity, unit, difference), *cpus)
    return found


def unknown_amount(identity: str, most: int) -> int:
    """An amount that is no charge in advance and no page of a stack."""
    return most - 1 if identity in ("usage", "kernel_stack") else most


@pytest.mark.parametrize("identity", BOUNDS)
def test_one_charge_of_each_identity(identity: str) -> None:
    """Without evidence for the amount, a row is unverifiable up to the bound of each CPU."""
    function, unit, most = BOUNDS[identity]
    inside = unknown_amount(identity, most)
    for sign in (1, -1):
        assert status(identity, unit, sign * inside, cpu(function)) == "unverifiable"
        assert status(identity, unit, sign * (most + 1), cpu(function)) == "differs"
        assert status(identity, unit, sign * 2 * most, cpu(function), cpu(function, 1)) == (
            "unverifiable"
        )
    assert status(identity, unit, 1, cpu(ELSEWHERE)) == "differs"
    assert status(identity, unit, 1) == "differs"


@pytest.mark.parametrize(
    ("function", "explained"),
    [
        ("__mod_memcg_lruvec_state", {"page_levels", "node_levels"}),
        ("__lruvec_stat_mod_folio", {"page_levels", "node_levels"}),
        ("mod_lruvec_page_state", {"page_levels", "node_levels"}),
        ("mod_node_page_state", {"node_levels", "node_totals"}),
        ("refresh_cpu_vm_stats", {"node_levels", "node_totals", "zone_free", "zone_totals"}),
        ("mod_zone_page_state", {"zone_free", "zone_totals"}),
        ("__swap_cache_add_folio", {"node_levels"}),
        # They charge pages, and call functions that change one counter at all its levels.
        ("free_unref_page", set()),
        ("folio_batch_move_lru", set()),
        ("dup_task_struct", set()),
        ("__vmalloc_area_node", set()),
    ],
)
def test_levels_of_one_counter(function: str, explained: set[str]) -> None:
    """They differ only within the functions that change several levels."""
    for identity in ("page_levels", "node_levels", "node_totals", "zone_free", "zone_totals"):
        expected = "unverifiable" if identity in explained else "differs"
        assert status(identity, "pages", 1, cpu(function)) == expected, identity


@pytest.mark.parametrize(
    "identity",
    [
        *("node_slab", "node_stack", "node_pagetable", "node_vmalloc", "node_levels"),
        *("zone_free", "zone_zspages", "zone_mlock", "zone_lru"),
    ],
)
def test_counters_of_nodes_that_a_cpu_folds(identity: str) -> None:
    """Any CPU that adds to counters of nodes may have moved its part of this one only half."""
    unit: Unit = "KiB" if identity == "node_stack" else "pages"
    row = make_row(RowKey(identity, "ITEM", unit, nid=0), {"x": 0}, {"vm_stat": DIFF})
    more = make_row(RowKey(identity, "ITEM", unit, nid=0), {"x": 0}, {"vm_stat": DIFF + 1})
    folding = cpu("refresh_cpu_vm_stats")
    assert marked([row], folding) == ["unverifiable"]
    assert marked([more], folding) == ["differs"]


def test_totals_of_nodes_that_a_cpu_folds() -> None:
    """It adds to those of all nodes after it has visited the nodes: many counters, but little."""
    rows = rows_off("node_totals", "pages", *range(1, 20), 2 * DIFF)
    assert set(marked(rows, cpu("fold_diff"))) == {"unverifiable"}
    assert marked(rows_off("node_totals", "pages", 2 * DIFF + 1), cpu("fold_diff")) == ["differs"]


def test_identities_that_nothing_leaves_half_done() -> None:
    names = {check.name for check in CHECKS if check.half_done is None}
    assert names >= WHOLE
    assert BOUNDS.keys() <= {check.name for check in CHECKS} - names
    # A CPU may have been anywhere: in a flush, which takes memcgs off lists.
    for name in names - {"updated"}:
        assert status(name, "pages", 1, cpu("alloc_pages_noprof"), cpu("", 1, None, 0)) == "differs"


@pytest.mark.parametrize(
    "identity",
    [
        name
        for name in BOUNDS
        if name not in ("objcg_bytes", "usage", "references", "lru")
        and name not in ("sock_bytes", "objcg_sets", "reparenting", "alloc_tags")
        # Counters of nodes and page counters are not flushed.
        and name not in ("node_slab", "node_stack", "node_pagetable", "node_vmalloc", "node_totals")
        and not name.startswith("zone_")
        and name not in ("swap_usage", "kmem_usage", "tcpmem")
    ],
)
def test_a_flush_moves_counters_by_any_amount(identity: str) -> None:
    _, unit, most = BOUNDS[identity]
    flushing = cpu("mem_cgroup_css_rstat_flush")
    assert status(identity, unit, 100 * most, flushing) == "unverifiable"
    # of the memcg that it flushes, and of its ancestors
    assert marked(rows_off(identity, unit, 100 * most, memcg=B), flushing) == ["differs"]


@pytest.mark.parametrize("identity", ["kmem", "alloc_tags", "hierarchy"])
def test_rows_in_bytes_of_what_is_charged_in_pages(identity: str) -> None:
    function, _, most = BOUNDS[identity]
    assert status(identity, "bytes", most * PAGE, cpu(function)) == "unverifiable"
    assert status(identity, "bytes", most * PAGE + 1, cpu(function)) == "differs"


@pytest.mark.parametrize(
    ("identity", "unit", "amount"),
    [("kmem", "pages", 3), ("kmem", "bytes", 3 * PAGE), ("usage", "pages", 3)],
)
def test_pages_that_a_stock_uncharges(identity: str, unit: Unit, amount: int) -> None:
    """drain_obj_stock() uncharges the whole pages of what the CPU has in stock."""
    stocks = [ObjStock(0, 0, OBJCG_A, 3 * PAGE + 100, None, 0, 0, False)]
    draining = cpu("drain_obj_stock")

    def status_of(difference: int) -> list[str]:
        return marked(rows_off(identity, unit, difference), draining, stocks=stocks)

    assert status_of(amount) == status_of(-amount) == ["in-flight"]
    for other in (amount - 1, amount + 1, 3 if unit == "bytes" else 2):
        assert status_of(other) == ["unverifiable"]
    # They are in the stock of another CPU.
    elsewhere = cpu("drain_obj_stock", 1)
    assert marked(rows_off(identity, unit, amount), elsewhere, stocks=stocks) == ["unverifiable"]


@pytest.mark.parametrize(
    ("detail", "expected"), [("unreclaimable", "in-flight"), ("", "unverifiable")]
)
def test_kernel_memory_that_is_a_large_kmalloc(detail: str, expected: str) -> None:
    """Other kernel memory is in no counter of slab memory, whatever its size."""
    row = make_row(
        RowKey("slab", "NR_SLAB_UNRECLAIMABLE_B", "bytes", A, nid=0), {"x": 0}, {"y": -4 * PAGE}
    )
    stopped = cpu(
        "__memcg_slab_free_hook", held=(*ITS_MEMCG, Held("kmem", 0xE000, A, 0, 4 * PAGE, detail))
    )
    assert marked([row], stopped) == [expected]


@pytest.mark.parametrize("kind", ["object", "cache", "percpu", "kmem", "folio", "batch"])
def test_what_is_charged_holds_a_reference(kind: HeldKind) -> None:
    """Of an object, a register may have the cache only."""
    row = make_row(RowKey("references", "refcnt", "references", A, 0, OBJCG_A), {"x": 0}, {"y": 1})
    held = (Held("objcg", OBJCG_A, OBJCG_A), Held(kind, 0xE000, 0, 0, 200))
    assert marked([row], cpu("obj_cgroup_charge", held=held)) == ["in-flight"]
    nothing = (Held("objcg", OBJCG_A, OBJCG_A), Held("memcg", A, A))
    assert marked([row], cpu("obj_cgroup_charge", held=nothing)) == ["unverifiable"]


@pytest.mark.parametrize("payer", [0, A])
@pytest.mark.parametrize("kind", sorted(OF_OBJECTS | OF_PAGES))
@pytest.mark.parametrize("identity", SHOWN)
def test_the_kinds_of_charges_that_show_in_an_identity(
    identity: str, kind: HeldKind, payer: int
) -> None:
    """In some, the charge of a folio or of an object that has an owner is done."""
    function, unit, _ = BOUNDS[identity]
    item = "NR_SLAB_UNRECLAIMABLE_B" if identity == "slab" else "ITEM"
    amount = {"bytes": 2 * PAGE, "pages": 2, "references": 1}[unit]
    row = make_row(RowKey(identity, item, unit, A, 0), {"x": 0}, {"y": amount})
    charged = Held(kind, 0xE000, payer, 0, 2 * PAGE, "unreclaimable")
    is_done = payer and identity in OWNED_LATER and kind not in ("kmem", "batch", "zswap")
    [found] = marked([row], cpu(function, held=(*ITS_MEMCG, charged)))
    assert (found == "in-flight") == (kind in SHOWN[identity] and not is_done)


def test_pages_of_a_stack() -> None:
    """account_kernel_stack() counts one page after the other."""
    for pages in range(1, LIMITS.stack // PAGE + 1):
        size = pages * PAGE // 1024
        assert status("kernel_stack", "KiB", size, cpu("dup_task_struct")) == "in-flight"
        assert status("kernel_stack", "KiB", size - 1, cpu("dup_task_struct")) == "unverifiable"


def test_rows_of_subtrees_are_told_apart_by_counter() -> None:
    """A charge shows in every ancestor's row of one counter: rows of others are not counted."""

    def rows(item: str) -> list[Row]:
        key = RowKey("hierarchy", item, "pages")
        return [make_row(key._replace(memcg=m), {"x": 0}, {"y": 1}) for m in (B, A, ROOT)]

    below = cpu("pcpu_alloc_noprof", held=(Held("memcg", B, B),))
    assert marked([*rows("MEMCG_SOCK"), *rows("MEMCG_PERCPU_B")], below) == (
        ["differs"] * 3 + ["unverifiable"] * 3
    )


@pytest.mark.parametrize(
    ("identity", "unread"),
    [
        ("kmem", BLOCK),
        ("usage", FOLIOS * BLOCK),
        ("lru", FOLIOS * BLOCK),
        ("user_pages", FOLIOS * BLOCK),
        ("hierarchy", BLOCK),
    ],
)
def test_pages_that_the_stack_points_to(identity: str, unread: int) -> None:
    function, unit, most = BOUNDS[identity]
    assert status(identity, unit, most + 8, cpu(function, held=pages(9))) == "unverifiable"
    assert status(identity, unit, most + 10, cpu(function, held=pages(9))) == "differs"
    assert status(identity, unit, most + unread, cpu(function, held=None)) == "unverifiable"
    assert status(identity, unit, most + unread + 1, cpu(function, held=None)) == "differs"


def test_a_stack_that_could_not_be_read_may_point_to_pages_of_bytes() -> None:
    function, unit, most = BOUNDS["slab"]
    unread = most + BLOCK * PAGE
    assert status("slab", unit, unread, cpu(function, held=None)) == "unverifiable"
    assert status("slab", unit, unread + 1, cpu(function, held=None)) == "differs"


def test_huge_pages_of_vmalloc_have_no_order() -> None:
    inside = cpu("vm_area_alloc_pages", held=pages(9))
    assert status("kmem", "pages", KMEM + 9 + BLOCK, inside) == "unverifiable"
    assert status("kmem", "pages", KMEM + 9 + BLOCK + 1, inside) == "differs"
    assert status("kmem", "bytes", (KMEM + 9 + BLOCK) * PAGE, inside) == "unverifiable"
    assert status("kmem", "bytes", (KMEM + 9 + BLOCK) * PAGE + 1, inside) == "differs"
    # They are in no counter of slab memory.
    function, unit, most = BOUNDS["slab"]
    both = cpu(function, held=())
    both = both._replace(functions=(*both.functions, "vm_area_alloc_pages"))
    assert status("slab", unit, most, both) == "unverifiable"
    assert status("slab", unit, most + 1, both) == "differs"


@pytest.mark.parametrize("identity", ["objcg_bytes", "kmem", "usage", "kmem_usage"])
def test_bytes_of_objects_are_charged_in_pages(identity: str) -> None:
    """Until the object is there, or in a list, the pages are charged for nothing that is found."""
    for function in ("__memcg_slab_post_alloc_hook", "pcpu_alloc_noprof", "zswap_store"):
        assert status(identity, BOUNDS[identity][1], 1, cpu(function)) == "unverifiable"


@pytest.mark.parametrize("kind", ["object", "cache", "zswap", "percpu"])
def test_an_object_of_part_of_a_page(kind: HeldKind) -> None:
    """obj_cgroup_charge() rounds pages up. The rest of them may be in a stock already, or not."""
    held = (*ITS_MEMCG, Held(kind, 0xE000, 0, 0, PAGE + 8))
    for pages, expected in ((1, "in-flight"), (2, "in-flight"), (3, "unverifiable")):
        assert status("kmem", "pages", pages, cpu("kmem_cache_alloc", held=held)) == expected


def test_a_stack_that_could_not_be_unwound_may_be_anywhere() -> None:
    assert status("slab", "bytes", 8, cpu(ELSEWHERE, held=None, frames=2)) == "unverifiable"
    assert status("slab", "bytes", 8, cpu(ELSEWHERE, frames=3)) == "differs"
    idle = Running(0, 0, "swapper", (), False)
    assert status("slab", "bytes", 8, idle) == "differs"


def test_one_charge_shows_in_two_rows_and_not_in_three() -> None:
    """That of its memcg, and that of the parent, whose share is computed from it."""
    function, unit, _ = BOUNDS["sock"]
    assert set(marked(rows_off("sock", unit, 1, -1), cpu(function))) == {"unverifiable"}
    assert marked(rows_off("sock", unit, 1, -1, 1), cpu(function)) == ["differs"] * 3
    assert set(marked(rows_off("sock", unit, 1, -1, 1), cpu(function), cpu(function, 1))) == {
        "unverifiable"
    }
    # rows of another identity do not count
    mixed = [*rows_off("sock", unit, 1, 1), *rows_off("pagetable", "pages", 1, 1)]
    assert marked(mixed, cpu(function)) == ["unverifiable"] * 2 + ["differs"] * 2


def test_a_charge_shows_in_the_rows_of_all_ancestors() -> None:
    """``/a/b`` has two: ``/a`` and the root. A charge shows in one counter of each."""

    def subtrees(*memcgs: int, item: str = "MEMCG_KMEM") -> list[Row]:
        key = RowKey("hierarchy", item, "pages")
        return [
            make_row(key._replace(memcg=memcg, nid=nid), {"x": 0}, {"y": 1})
            for nid, memcg in enumerate(memcgs)
        ]

    below = cpu("obj_cgroup_charge_pages", held=(Held("memcg", B, B),))
    assert set(marked(subtrees(B, A, ROOT), below)) == {"unverifiable"}
    assert set(marked(subtrees(B, A, ROOT, ROOT), below)) == {"differs"}
    # What makes the charges of a counter is known from the identity that compares it.
    assert marked(subtrees(B, item="MEMCG_PERCPU_B"), cpu("kmem_cache_alloc")) == ["differs"]
    below = cpu("pcpu_alloc_noprof", held=(Held("memcg", B, B),))
    assert set(marked(subtrees(B, A, item="MEMCG_PERCPU_B"), below)) == {"unverifiable"}


def test_one_more_charge_in_an_interrupt() -> None:
    function, unit, _ = BOUNDS["sock"]
    interrupted = Running(
        0, 7, "sh", (function, "handle_softirqs", "asm_sysvec_apic_timer_interrupt"), True, None
    )
    assert set(marked(rows_off("sock", unit, 1, -1, 1), interrupted)) == {"unverifiable"}


def test_rows_that_are_exact_or_unverifiable_stay() -> None:
    rows = [
        *rows_off("sock", "pages", 0),
        make_row(RowKey("sock", "X", "pages", B), {"x": 1}, None),
    ]
    assert marked(rows, cpu("tcp_sendmsg")) == ["exact", "unverifiable"]


@pytest.mark.parametrize(
    ("part", "matching", "others"),
    [
        (SOCK, ["sk_wmem_queued_add", "__sk_mem_schedule", "tcp_recvmsg"], ["task_work_run"]),
        (
            CGROUP,
            ["css_release_work_fn", "__x64_sys_bpf", "bpf_map_put"],
            ["rcu_core", "bpf_lsm_x"],
        ),
        (SLAB, ["__memcg_slab_free_hook", "kmem_cache_free", "kfree"], ["vfs_write", "slabinfo"]),
        (PAGES, ["__free_frozen_pages", "pte_alloc_one"], ["vpanic", "homepage"]),
        (LRU, ["__folio_batch_add_and_move", "lru_add_drain"], ["flush_tlb_func"]),
        (STACK, ["copy_process", "vfree"], ["kthread", "ret_from_fork"]),
        (VMALLOC, ["__vmalloc_node_range_noprof", "vmap"], ["is_vmalloc_addr"]),
        (PERCPU, ["pcpu_alloc_noprof", "free_percpu"], ["percpu_counter_add_batch"]),
    ],
)
def test_functions_match_by_the_beginning_of_their_names(
    part: str, matching: list[str], others: list[str]
) -> None:
    for name in matching:
        assert pattern(part).match(name), name
    for name in others:
        assert not pattern(part).match(name), name


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(1, "in-flight"), (2, "in-flight"), (3, "unverifiable"), (4, "differs"), (-1, "differs")],
)
def test_references_of_what_is_being_freed(difference: int, expected: str) -> None:
    key = RowKey("references", "refcnt", "references", A, 0, OBJCG_A)
    row = make_row(key, {"slab": 5}, {"refcnt": 5 + difference})
    some = {
        OBJCG_A: [
            Transient("memcg", 0x10, freed_by="its work item is queued"),
            Transient("memcg", 0x20, freed_by="its RCU callback is queued on CPU 1", unsure=True),
            Transient("BPF map", 0x30, unsure=True),
            Transient("memcg", 0x40),
        ]
    }
    taken = snapshot(transients=some)
    [found] = mark_in_flight(taken, [row])
    assert found.status == expected
    if expected == "in-flight":
        assert found.reason == (
            "objects being created or freed hold at most 2 references: memcg (0x10): its work "
            "item is queued, memcg (0x20): its RCU callback is queued on CPU 1"
        )
    if expected == "unverifiable":
        assert found.reason is not None
        assert "BPF map (0x30)" in found.reason
    # of another obj_cgroup
    [found] = mark_in_flight(taken, [make_row(key._replace(objcg=0xB0), row.found, row.claimed)])
    assert found.status == "differs"


@pytest.mark.parametrize(
    ("identity", "expected"),
    [("usage", "unverifiable"), ("lru", "in-flight"), ("user_pages", "in-flight")],
)
def test_a_folio_that_somebody_pays_for_may_be_on_its_way_to_a_list(
    identity: str, expected: str
) -> None:
    """It is charged. Its list and the counters of user pages are changed later."""
    function, unit, _ = BOUNDS[identity]
    held = (*ITS_MEMCG, Held("folio", 0xE000, A, 0, 8 * PAGE))
    assert status(identity, unit, 8, cpu(function, held=held)) == expected


def test_a_cpu_may_move_what_is_in_its_stock_or_on_its_stack() -> None:
    """__account_obj_stock() clears the bytes in the stock, and has them in a register then."""
    stocks = [
        ObjStock(0, 0, OBJCG_A, 100, 0, -8, 16, False),
        ObjStock(1, 0, OBJCG_A, 7, 0, 7, 7, False),
    ]
    cpu = Running(0, 5, "test", ("__account_obj_stock",), True, numbers=frozenset({4104}))
    assert sorted(slab_amounts(snapshot(stocks=stocks), cpu)) == [8, 16, 100, 4104]


@pytest.mark.parametrize(
    ("identity", "functions"),
    [
        ("levels", "__mod_objcg_mlstate account_obj_stock drain_obj_stock refill_obj_stock"),
        ("pagetable", "exit_mm mmput __mmput tlb_finish_mmu mem_cgroup_css_rstat_flush"),
        ("node_pagetable", "exit_mm mmput __mmput tlb_finish_mmu"),
        ("node_slab", "allocate_slab new_slab __free_slab discard_slab rcu_free_slab"),
        ("node_slab", "___kmalloc_large_node free_large_kmalloc"),
        ("zswap", "zswap_store zs_free swap_writeout shrink_memcg_cb"),
    ],
)
def test_functions_that_charge_or_uncharge(identity: str, functions: str) -> None:
    [check] = [check for check in CHECKS if check.name == identity]
    assert check.half_done is not None
    for function in functions.split():
        assert check.half_done.place(cpu(function)) == function


def test_functions_outside_of_which_no_swap_is_charged() -> None:
    [check] = [check for check in CHECKS if check.name == "swap_usage"]
    assert check.half_done is not None and check.half_done.only_in is not None
    for function in (
        "__mem_cgroup_try_charge_swap",
        "__mem_cgroup_uncharge_swap",
        "memcg1_swapout",
    ):
        assert check.half_done.only_in.match(function), function
    assert not check.half_done.only_in.match("folio_batch_move_lru")
