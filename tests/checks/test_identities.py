# SPDX-License-Identifier: LGPL-2.1-or-later
"""Identities other than ``slab``, on snapshots made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.made import (
    DEAD,
    OBJCG_A,
    OBJCG_B,
    OBJCG_DEAD,
    ROOT,
    A,
    B,
    family,
    family_objcgs,
    features,
    ledger,
    snapshot,
)
from support.made_charges import CHARGES, MEMCG_STATS, NODE_ITEMS, OBJCGS, image, own

from memcg_inspect.checks.identities.hierarchy import hierarchy_rows
from memcg_inspect.checks.identities.kernel_stack import stack_rows
from memcg_inspect.checks.identities.kmem import kmem_rows
from memcg_inspect.checks.identities.levels import level_rows
from memcg_inspect.checks.identities.objcg_bytes import objcg_rows
from memcg_inspect.checks.identities.pagetable import pagetable_rows
from memcg_inspect.checks.identities.percpu import percpu_rows
from memcg_inspect.checks.identities.placement import placement_rows
from memcg_inspect.checks.identities.references import reference_rows
from memcg_inspect.checks.identities.sock import sock_rows
from memcg_inspect.checks.identities.task_objcg import task_rows
from memcg_inspect.checks.identities.usage import usage_rows
from memcg_inspect.checks.identities.vmalloc import vmalloc_rows
from memcg_inspect.checks.identities.zswap import zswap_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, Nodes, Objcg, Vectors
from memcg_inspect.model_tasks import TaskCharge
from memcg_inspect.report import Evidence, Row

RULES = [
    stack_rows,
    pagetable_rows,
    vmalloc_rows,
    kmem_rows,
    percpu_rows,
    objcg_rows,
    zswap_rows,
    sock_rows,
    usage_rows,
    reference_rows,
]


def the(rows: list[Row], memcg: int, nid: int | None = None, item: str | None = None) -> Row:
    [row] = [
        row
        for row in rows
        if (row.memcg, row.nid) == (memcg, nid) and (item is None or row.item == item)
    ]
    return row


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_charges_and_counters_agree(rule: Callable[[Snapshot], list[Row]]) -> None:
    rows = rule(image())
    assert rows
    assert {row.status for row in rows} == {"exact"}, [r for r in rows if r.difference]
    assert any(sum(row.found.values()) for row in rows)


def test_stacks_are_in_kib_by_node() -> None:
    rows = stack_rows(image())
    assert len(rows) == 3 * 2
    assert the(rows, A, 0).found == {"stack": 48}
    assert the(rows, A, 1).found == {"stack": 16}
    assert {row.unit for row in rows} == {"KiB"}


def test_stacks_on_larger_pages() -> None:
    # one page of 16 KiB
    taken = image(charges=ledger({(OBJCG_A, "kmem", "stack", 0): (16384, 1)}))
    assert the(stack_rows(taken), A, 0).found == {"stack": 16}


def test_page_tables_are_in_pages_by_node() -> None:
    row = the(pagetable_rows(image()), A, 1)
    assert (row.found, row.unit, row.item) == ({"table": 1}, "pages", "NR_PAGETABLE")


def test_vmalloc_by_node_or_by_memcg_as_the_kernel_keeps_it() -> None:
    assert the(vmalloc_rows(image()), A, 0).item == "NR_VMALLOC"
    older = image(features=features("MEMCG_VMALLOC"))
    row = the(vmalloc_rows(older), A)
    assert (row.item, row.found, row.status) == ("MEMCG_VMALLOC", {"vmalloc": 5}, "exact")


def test_kmem_is_pages_and_whole_pages_of_objects() -> None:
    rows = kmem_rows(image())
    # 12 + 4 + 1 + 5 of its own and 2 of the removed memcg
    assert the(rows, A).found == {"kmem_pages": 24, "objects": 1}
    assert the(rows, B).found == {"kmem_pages": 0, "objects": 2}
    assert the(rows, ROOT).found == {"kmem_pages": 0, "objects": 0}


def test_percpu_is_data_and_metadata() -> None:
    assert the(percpu_rows(image()), A).found == {"percpu": 400, "metadata": 100}


def test_zswap_is_bytes_entries_and_what_did_not_compress() -> None:
    rows = zswap_rows(image())
    assert the(rows, B, item="MEMCG_ZSWAP_B").found == {"zswap": 1096 + 4096}
    assert the(rows, B, item="MEMCG_ZSWAPPED").found == {"zswap": 2}
    assert the(rows, B, item="MEMCG_ZSWAP_INCOMP").found == {"zswap": 1}


def test_zswap_items_that_a_kernel_lacks_have_no_rows() -> None:
    rows = zswap_rows(image(features=features("MEMCG_ZSWAP_B", "MEMCG_ZSWAPPED")))
    assert {row.item for row in rows} == {"MEMCG_ZSWAP_B", "MEMCG_ZSWAPPED"}


def test_sockets_of_removed_memcgs_are_their_payers() -> None:
    rows = sock_rows(image())
    assert the(rows, A).found == {"sock": 1}
    assert the(rows, B).found == {"sock": 6}


def test_usage_is_everything() -> None:
    rows = usage_rows(image())
    row = the(rows, A)
    assert row.found == {"lru": 3, "kmem": 25, "sock": 1, "stock": 8}
    # A page counter includes descendants; a removed memcg's is stale and does not count.
    assert row.claimed == {"page_counter": 55 - 18}
    assert row.hierarchy == 55
    assert the(rows, B).claimed == {"page_counter": 18}
    assert all(row.memcg != ROOT for row in rows)


def test_usage_that_was_not_read_leaves_parent_and_child_unverified() -> None:
    rows = usage_rows(image(usage={ROOT: 999, A: 55, DEAD: 1}))
    assert the(rows, B).status == "unverifiable"
    assert the(rows, A).status == "unverifiable"
    assert the(rows, A).claimed is None


def test_bytes_of_an_objcg_are_whole_pages() -> None:
    rows = {row.objcg: row for row in objcg_rows(image())}
    assert rows[OBJCG_A].found == {
        "slab": 1000,
        "percpu": 500,
        "zswap": 200,
        "stock": 300,
        "nr_charged_bytes": 2096,
    }
    assert rows[OBJCG_A].claimed == {"whole_pages": 4096}
    assert rows[OBJCG_B].claimed == {"whole_pages": 8192}
    assert rows[OBJCG_DEAD].claimed == {"whole_pages": 0}


@pytest.mark.parametrize(("missing", "difference"), [(200, 200), (-64, -64), (8, 8)])
def test_missing_bytes_of_an_objcg_show_exactly(missing: int, difference: int) -> None:
    charges = {**CHARGES, (OBJCG_A, "slab", "reclaimable", 0): (1000 - missing, 5)}
    rows = {row.objcg: row for row in objcg_rows(image(charges=ledger(charges)))}
    assert rows[OBJCG_A].status == "differs"
    assert rows[OBJCG_A].difference == difference
    assert {row.status for objcg, row in rows.items() if objcg != OBJCG_A} == {"exact"}


@pytest.mark.parametrize(
    ("rest", "difference"), [(0, 0), (1, -1), (2047, -2047), (2048, 2048), (4095, 1)]
)
def test_bytes_are_compared_with_the_nearest_number_of_pages(rest: int, difference: int) -> None:
    objcgs = {OBJCG_A: Objcg(OBJCG_A, A, 0, False, rest)}
    [row] = objcg_rows(image(charges=ledger({}), stocks=[], objcgs=objcgs))
    assert row.difference == difference


def test_kmem_by_node_where_the_kernel_accounts_by_node() -> None:
    on_1 = 0xA8
    charges = {
        # 3 pages on node 0, 1 on node 1
        (OBJCG_A, "kmem", "stack", 0): (3 * 4096, 3),
        (on_1, "kmem", "table", 1): (4096, 1),
        # one page of objects on node 0, two on node 1
        (OBJCG_A, "slab", "reclaimable", 0): (4000, 20),
        (on_1, "slab", "reclaimable", 1): (8192, 20),
    }
    objcgs = {
        OBJCG_A: Objcg(OBJCG_A, A, 0, False, 96),
        on_1: Objcg(on_1, A, 1, False, 0),
    }
    kept = {
        (memcg, nid): own(NR_KMEM=pages if memcg in (ROOT, A) else 0)
        for memcg in (ROOT, A, B, DEAD)
        for nid, pages in ((0, 4), (1, 3))
    }
    taken = image(
        charges=ledger(charges),
        objcgs=objcgs,
        stocks=[],
        lruvec_stats=kept,
        features=features("NR_KMEM"),
    )
    rows = kmem_rows(taken)
    assert {(row.memcg, row.nid) for row in rows} == {(m, n) for m in (ROOT, A, B) for n in (0, 1)}
    assert {(row.status, row.item, row.unit) for row in rows} == {("exact", "NR_KMEM", "pages")}
    assert the(rows, A, 0).found == {"kmem_pages": 3, "objects": 1}
    assert the(rows, A, 1).found == {"kmem_pages": 1, "objects": 2}
    assert the(rows, B, 1).found == {"kmem_pages": 0, "objects": 0}
    kept[A, 1] = own(NR_KMEM=5)
    assert [(row.memcg, row.nid, row.difference) for row in kmem_rows(taken) if row.difference] == [
        (ROOT, 1, -2),
        (A, 1, 2),
    ]


def test_references_are_counted_by_holder() -> None:
    rows = {row.objcg: row for row in reference_rows(image())}
    assert rows[OBJCG_A].found == {
        "memcg": 1,
        "kmem": 22,
        "slab": 5,
        "percpu": 1,
        "zswap": 1,
        "task": 2,
        "stock": 1,
    }
    assert sum(rows[OBJCG_A].found.values()) == 33
    assert rows[OBJCG_B].found == {"memcg": 1, "zswap": 2, "lru": 7}


def test_leaked_reference_shows() -> None:
    leaky = {**OBJCGS, OBJCG_B: Objcg(OBJCG_B, B, 0, False, 3000, refs=11, memcg_refs=1)}
    rows = {row.objcg: row for row in reference_rows(image(objcgs=leaky))}
    assert (rows[OBJCG_B].status, rows[OBJCG_B].difference) == ("differs", 1)
    assert rows[OBJCG_A].status == "exact"


def test_user_pages_hold_no_objcg_on_older_kernels() -> None:
    older = image(features=features(lru_holds_objcg=False))
    rows = {row.objcg: row for row in reference_rows(older)}
    assert "lru" not in rows[OBJCG_B].found


def test_count_that_was_not_read_is_no_count() -> None:
    rows = reference_rows(image(objcgs=family_objcgs()))
    assert {row.status for row in rows} == {"unverifiable"}


def test_objcgs_of_the_root_are_not_counted() -> None:
    objcgs = {**OBJCGS, 0xE0: Objcg(0xE0, ROOT, 0, True, 17, refs=5)}
    taken = image(objcgs=objcgs)
    assert all(row.objcg != 0xE0 for row in reference_rows(taken) + objcg_rows(taken))


def missing(kind: ChargeKind) -> Snapshot:
    charges = ledger(CHARGES)
    charges.note_missing(kind)
    return image(charges=charges)


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        ("kmem", [stack_rows, pagetable_rows, vmalloc_rows, kmem_rows, usage_rows, reference_rows]),
        ("slab", [kmem_rows, objcg_rows, usage_rows, reference_rows]),
        ("percpu", [percpu_rows, kmem_rows, objcg_rows, usage_rows, reference_rows]),
        ("zswap", [zswap_rows, kmem_rows, objcg_rows, usage_rows, reference_rows]),
        ("lru", [usage_rows, reference_rows]),
        ("sock", [sock_rows, usage_rows]),
    ],
)
def test_missing_charges_touch_what_needs_the_kind_and_nothing_else(
    kind: ChargeKind, rules: list[Callable[[Snapshot], list[Row]]]
) -> None:
    for rule in RULES:
        expected = {"unverifiable"} if rule in rules else {"exact"}
        assert {row.status for row in rule(missing(kind))} == expected, rule.__name__


@pytest.mark.parametrize(
    ("subject", "rules"),
    [
        ("vmalloc", [stack_rows, vmalloc_rows]),
        ("charge_stock", [usage_rows]),
        ("tasks", [reference_rows]),
        ("bpf", [reference_rows]),
    ],
)
def test_what_else_could_not_be_read(
    subject: str, rules: list[Callable[[Snapshot], list[Row]]]
) -> None:
    for rule in RULES:
        expected = {"unverifiable"} if rule in rules else {"exact"}
        rows = rule(image(coverage={subject: Coverage(5, 1)}))
        assert {row.status for row in rows} == expected, rule.__name__


def test_levels() -> None:
    nodes = {
        (memcg, nid): own(NR_SLAB_RECLAIMABLE_B=100 * nid + 8, NR_SLAB_UNRECLAIMABLE_B=0)
        for memcg in (ROOT, A, B)
        for nid in (0, 1)
    }
    nodes |= {
        (DEAD, nid): own(NR_SLAB_RECLAIMABLE_B=0, NR_SLAB_UNRECLAIMABLE_B=0) for nid in (0, 1)
    }
    # 8 + 108 in each; all of it is /a/b's
    whole = {m: own(NR_SLAB_RECLAIMABLE_B=116, NR_SLAB_UNRECLAIMABLE_B=0) for m in (ROOT, A, B)}
    whole[DEAD] = own(NR_SLAB_RECLAIMABLE_B=0, NR_SLAB_UNRECLAIMABLE_B=0)
    rows = level_rows(snapshot(lruvec_stats=nodes, memcg_stats=whole))
    assert {row.status for row in rows} == {"exact"}
    assert the(rows, B, item="NR_SLAB_RECLAIMABLE_B").found == {"nodes": 116}
    whole[B] = own(NR_SLAB_RECLAIMABLE_B=117, NR_SLAB_UNRECLAIMABLE_B=0)
    rows = level_rows(snapshot(lruvec_stats=nodes, memcg_stats=whole))
    differing = {(row.memcg, row.difference) for row in rows if row.status == "differs"}
    assert differing == {(B, 1), (A, -1)}


def test_hierarchy_is_what_the_subtree_holds() -> None:
    taken = image()
    rows = hierarchy_rows(taken, kmem_rows(taken) + sock_rows(taken))
    # only memcgs with live children
    assert {row.memcg for row in rows} == {ROOT, A}
    assert {row.status for row in rows} == {"exact"}
    assert the(rows, A, item="MEMCG_KMEM").found == {"subtree": 27}
    assert the(rows, ROOT, item="MEMCG_SOCK").found == {"subtree": 7}


def test_vector_on_another_node_is_counted_and_right() -> None:
    vectors = {0: Vectors(5, elsewhere=2), 1: Vectors(3, 1, ((0xF00, 0, 0xE00),))}
    rows = placement_rows(image(vectors=vectors))
    assert [(row.nid, row.status, row.found, row.difference) for row in rows] == [
        (0, "exact", {"on_node": 3, "elsewhere": 2}, 0),
        (1, "differs", {"on_node": 1, "elsewhere": 1}, 1),
    ]


def test_a_vector_of_freed_memory_is_a_proof() -> None:
    vectors = {1: Vectors(3, 1, ((0xF00, 0, 0xE00),))}
    found = [p.finding for p in judge(image(vectors=vectors)).findings]
    [finding] = [finding for finding in found if finding.identity == "placement"]
    assert (finding.kind, finding.evidence_is) == ("dangling-vector", "proof")
    note = "slab on node 1"
    assert finding.evidence == (Evidence(0xF00, "obj_exts", nid=0, page=0xE00, note=note),)


def task(memcg: int, *objcgs: int, stale: bool = False, is_user: bool = True) -> TaskCharge:
    return TaskCharge(0x7000, 7, "sh", memcg, objcgs, stale, is_user)


@pytest.mark.parametrize(
    ("cached", "right"),
    [
        (task(A, OBJCG_A), True),
        # the removed memcg's objcg is /a's now, and so is a task that is still in it
        (task(A, OBJCG_DEAD), True),
        (task(DEAD, OBJCG_A), True),
        (task(A, OBJCG_B), False),
        (task(A, OBJCG_B, stale=True), True),
        (task(A, 0), False),
        (task(A, 0, is_user=False), True),
        (task(ROOT, 0), True),
        (task(A, 0xBAD), False),
        (task(A, OBJCG_A, OBJCG_A), True),
        (task(A, OBJCG_A, OBJCG_B), False),
    ],
)
def test_task_charges_the_memcg_it_is_in(cached: TaskCharge, right: bool) -> None:
    [row] = task_rows(image(tasks=[cached]))
    assert row.status == ("exact" if right else "differs")


def outcome(taken: Snapshot) -> dict[str, tuple[str, str | None]]:
    return {i.name: (i.status, i.reason) for i in judge(taken).identities}


def test_what_a_kernel_does_not_keep_is_said_and_not_passed_over() -> None:
    bare = outcome(image(features=features(caches_objcg=False)))
    for name in ("percpu", "kernel_stack", "pagetable", "vmalloc", "kmem", "sock", "task_objcg"):
        status, reason = bare[name]
        assert status == "not-kept", name
        assert reason, name
    assert "MEMCG_PERCPU_B" in (bare["percpu"][1] or "")


def test_cgroup_v1_charges_neither_zswap_nor_sockets() -> None:
    v1 = outcome(image(features=features(*MEMCG_STATS[B], *NODE_ITEMS, default_hierarchy=False)))
    assert v1["zswap"][0] == v1["sock"][0] == "not-kept"
    assert v1["kmem"][0] == "exact"


def test_kernel_without_zswap() -> None:
    status, reason = outcome(image(features=features("MEMCG_ZSWAP_B", zswap=False)))["zswap"]
    assert (status, reason) == ("not-kept", "this kernel was built without zswap")


def test_a_subtree_has_what_stocks_have_not_given_to_its_counters() -> None:
    """What a stock holds is in no counter yet."""
    rows = [
        replace(row, found={"slab": 100}, claimed={"folded": 60, "stock": 40})
        for row in stack_rows(image())
        if (row.memcg, row.nid) in ((A, 0), (B, 0))
    ]
    assert the(hierarchy_rows(image(), rows), A, 0).found == {"subtree": 2 * (100 - 40)}


def test_slab_memory_of_nodes_that_are_not_flushed() -> None:
    """If there is some: the sum of the nodes, and the memcg, may have more or less."""
    lost = "node 1 has counters but no memory: the kernel does not flush them"
    for node, off, why in ((8, 3, lost), (8, -3, lost), (0, 3, None)):
        nodes = {(m, n): own(NR_SLAB_RECLAIMABLE_B=node * n) for m in family() for n in (0, 1)}
        whole = {m: own(NR_SLAB_RECLAIMABLE_B=node + off * (m == B)) for m in family()}
        taken = snapshot(
            lruvec_stats=nodes, memcg_stats=whole, all_nodes=Nodes(with_memory=frozenset({0}))
        )
        row = the(level_rows(taken), B, item="NR_SLAB_RECLAIMABLE_B")
        assert (row.difference, row.reason) == (off, why)
        assert row.status == ("differs" if why is None else "unverifiable")
    # What was not read may be some, and nothing is compared with a sum that is not whole.
    del nodes[B, 1]
    taken = snapshot(lruvec_stats=nodes, memcg_stats=whole)
    row = the(level_rows(taken), B, item="NR_SLAB_RECLAIMABLE_B")
    assert (row.status, row.found, row.claimed) == ("unverifiable", {"nodes": 0}, None)
