# SPDX-License-Identifier: LGPL-2.1-or-later
"""How much of each identity a stopped CPU may have left half done, and where."""

from __future__ import annotations

import pytest
from support.made import OBJCG_A, A, B, snapshot

from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Running, Transient, Unit
from memcg_inspect.report import Row

PAGE, HUGE, CPUS = 4096, 512, 2

#: One function of each identity that makes charges of it, the unit of its rows, and the most that
#: one CPU in that function leaves half done. The CPU's stack points to no folios.
BOUNDS: dict[str, tuple[str, Unit, int]] = {
    "slab": ("__memcg_slab_post_alloc_hook", "bytes", 2 * PAGE + 8),
    "percpu": ("pcpu_alloc_noprof", "bytes", 32768 * (CPUS + 4)),
    "kernel_stack": ("dup_task_struct", "KiB", 64),
    "pagetable": ("pagetable_pte_ctor", "pages", 2),
    "vmalloc": ("__vmalloc_area_node", "pages", 2 * HUGE),
    "kmem": ("obj_cgroup_charge_pages", "pages", 8),
    "objcg_bytes": ("refill_obj_stock", "bytes", PAGE),
    "zswap": ("zswap_store", "bytes", PAGE),
    "sock": ("tcp_sendmsg", "pages", 64),
    "sock_bytes": ("tcp_sendmsg", "references", 1),
    "usage": ("try_charge_memcg", "pages", 64 + 31),
    "lru": ("folio_batch_move_lru", "pages", 32),
    "levels": ("__mod_objcg_mlstate_kmem_cache", "bytes", 2 * PAGE + 8),
    "page_levels": ("free_unref_page", "pages", 2 * HUGE),
    "references": ("obj_cgroup_release", "references", 32),
    "reparenting": ("mem_cgroup_css_offline", "references", 1),
    "task_objcg": ("cgroup_migrate_execute", "references", 1),
    "alloc_tags": ("__alloc_frozen_pages", "references", HUGE),
    "hierarchy": ("obj_cgroup_charge_pages", "pages", 8),
}
#: A function that charges nothing.
ELSEWHERE = "osq_lock"


def cpu(function: str, number: int = 0, pages: int | None = 0, frames: int = 3) -> Running:
    functions = (function, *["do_syscall_64"] * frames)[:frames]
    return Running(number, 7, "sh", functions, True, pages)


def rows_off(identity: str, unit: Unit, *differences: int) -> list[Row]:
    """A row of ``/a`` for each difference."""
    return [
        make_row(RowKey(identity, f"ITEM{n}", unit, A), {"x": 0}, {"y": difference})
        for n, difference in enumerate(differences)
    ]


def marked(rows: list[Row], *cpus: Running, **more: object) -> list[str]:
    taken = snapshot(running=cpus, **more)
    return [row.status for row in mark_in_flight(taken, rows)]


def status(identity: str, unit: Unit, difference: int, *cpus: Running) -> str:
    [found] = marked(rows_off(identity, unit, difference), *cpus)
    return found


@pytest.mark.parametrize("identity", BOUNDS)
def test_one_charge_of_each_identity(identity: str) -> None:
    function, unit, most = BOUNDS[identity]
    for sign in (1, -1):
        assert status(identity, unit, sign * most, cpu(function)) == "in-flight"
        assert status(identity, unit, sign * (most + 1), cpu(function)) == "differs"
        assert status(identity, unit, sign * 2 * most, cpu(function), cpu(function, 1)) == (
            "in-flight"
        )
    assert status(identity, unit, 1, cpu(ELSEWHERE)) == "differs"
    assert status(identity, unit, 1) == "differs"


def test_identities_that_nothing_leaves_half_done() -> None:
    names = {check.name for check in CHECKS if check.half_done is None}
    assert names == {"node_slab", "placement"}
    assert names == {check.name for check in CHECKS} - BOUNDS.keys()
    for name in names:
        assert status(name, "pages", 1, cpu("alloc_pages_noprof"), cpu("", 1, None, 0)) == "differs"


@pytest.mark.parametrize(
    "identity",
    [
        name
        for name in BOUNDS
        if name not in ("objcg_bytes", "usage", "references", "lru")
        and name not in ("sock_bytes", "reparenting", "task_objcg", "alloc_tags")
    ],
)
def test_a_flush_moves_counters(identity: str) -> None:
    unit = BOUNDS[identity][1]
    assert status(identity, unit, 1, cpu("mem_cgroup_css_rstat_flush")) == "in-flight"


@pytest.mark.parametrize("identity", ["kmem", "alloc_tags", "hierarchy"])
def test_rows_in_bytes_of_what_is_charged_in_pages(identity: str) -> None:
    function, _, most = BOUNDS[identity]
    assert status(identity, "bytes", most * PAGE, cpu(function)) == "in-flight"
    assert status(identity, "bytes", most * PAGE + 1, cpu(function)) == "differs"


@pytest.mark.parametrize(
    ("identity", "unknown"),
    [("kmem", 2 * HUGE), ("usage", 31 * HUGE), ("lru", 31 * HUGE), ("hierarchy", 2 * HUGE)],
)
def test_folios_that_the_stack_points_to(identity: str, unknown: int) -> None:
    function, unit, most = BOUNDS[identity]
    assert status(identity, unit, most + 9, cpu(function, pages=9)) == "in-flight"
    assert status(identity, unit, most + 10, cpu(function, pages=9)) == "differs"
    assert status(identity, unit, most + unknown, cpu(function, pages=None)) == "in-flight"
    assert status(identity, unit, most + unknown + 1, cpu(function, pages=None)) == "differs"


def test_huge_pages_of_vmalloc_have_no_order() -> None:
    inside = cpu("vm_area_alloc_pages", pages=9)
    assert status("kmem", "pages", 8 + 9 + HUGE, inside) == "in-flight"
    assert status("kmem", "pages", 8 + 9 + HUGE + 1, inside) == "differs"


def test_a_stack_that_could_not_be_unwound_may_be_anywhere() -> None:
    assert status("slab", "bytes", 8, cpu(ELSEWHERE, frames=2)) == "in-flight"
    assert status("slab", "bytes", 8, cpu(ELSEWHERE, frames=3)) == "differs"
    idle = Running(0, 0, "swapper", (), False)
    assert status("slab", "bytes", 8, idle) == "differs"


def test_one_charge_shows_in_two_rows_and_not_in_three() -> None:
    """That of its memcg, and that of the parent, whose share is computed from it."""
    function, unit, _ = BOUNDS["sock"]
    assert marked(rows_off("sock", unit, 1, -1), cpu(function)) == ["in-flight"] * 2
    assert marked(rows_off("sock", unit, 1, -1, 1), cpu(function)) == ["differs"] * 3
    assert set(marked(rows_off("sock", unit, 1, -1, 1), cpu(function), cpu(function, 1))) == {
        "in-flight"
    }
    # rows of another identity do not count
    mixed = [*rows_off("sock", unit, 1, 1), *rows_off("pagetable", "pages", 1, 1)]
    assert marked(mixed, cpu(function)) == ["in-flight"] * 2 + ["differs"] * 2


@pytest.mark.parametrize("identity", ["references", "hierarchy"])
def test_one_charge_in_any_number_of_rows(identity: str) -> None:
    function, unit, _ = BOUNDS[identity]
    assert set(marked(rows_off(identity, unit, *[1] * 9), cpu(function))) == {"in-flight"}


def test_rows_that_are_exact_or_unverifiable_stay() -> None:
    rows = [
        *rows_off("sock", "pages", 0),
        make_row(RowKey("sock", "X", "pages", B), {"x": 1}, None),
    ]
    assert marked(rows, cpu("tcp_sendmsg")) == ["exact", "unverifiable"]


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(1, "in-flight"), (2, "in-flight"), (3, "differs"), (-1, "differs")],
)
def test_references_of_what_is_being_freed(difference: int, expected: str) -> None:
    key = RowKey("references", "refcnt", "references", A, 0, OBJCG_A)
    row = make_row(key, {"slab": 5}, {"refcnt": 5 + difference})
    two = {OBJCG_A: [Transient("BPF map", 0x10), Transient("page", 0x20)]}
    taken = snapshot(transients=two)
    [found] = mark_in_flight(taken, [row])
    assert found.status == expected
    if expected == "in-flight":
        assert found.reason == (
            "objects being freed hold at most 2 references: BPF map (0x10), page (0x20)"
        )
    # of another obj_cgroup
    [found] = mark_in_flight(taken, [make_row(key._replace(objcg=0xB0), row.found, row.claimed)])
    assert found.status == "differs"
