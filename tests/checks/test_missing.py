# SPDX-License-Identifier: LGPL-2.1-or-later
"""An identity makes no false finding where something that it needs could not be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.made import (
    DEAD,
    OBJCG_A,
    OBJCG_B,
    OBJCG_DEAD,
    RECLAIMABLE,
    ROOT,
    UNRECLAIMABLE,
    A,
    B,
    family,
    features,
    ledger,
    snapshot,
    zero,
)
from support.made_charges import CHARGES, MEMCG_STATS, PAGE, image

from memcg_inspect.checks.identities.hierarchy import hierarchy_rows
from memcg_inspect.checks.identities.kernel_stack import stack_rows
from memcg_inspect.checks.identities.kmem import kmem_rows
from memcg_inspect.checks.identities.node_totals import node_total_rows
from memcg_inspect.checks.identities.objcg_bytes import objcg_rows
from memcg_inspect.checks.identities.pagetable import pagetable_rows
from memcg_inspect.checks.identities.placement import placement_rows
from memcg_inspect.checks.identities.references import reference_rows
from memcg_inspect.checks.identities.slab import slab_rows
from memcg_inspect.checks.identities.sock_bytes import sock_bytes_rows
from memcg_inspect.checks.identities.usage import usage_rows
from memcg_inspect.checks.identities.vmalloc import vmalloc_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.kernel_pages import gone_pages
from memcg_inspect.checks.ledger import GONE, ChargeKind
from memcg_inspect.checks.node_pages import why_not_all_pages
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.skew import skew_matrix
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.sockets import SockUsage
from memcg_inspect.model import Coverage, Nodes, NodeStat, NodeUse, Objcg, Stat, Vectors
from memcg_inspect.report import Row


@pytest.mark.parametrize("rule", [kmem_rows, usage_rows])
def test_stock_not_read(rule: Callable[[Snapshot], list[Row]]) -> None:
    # 1000 bytes of objects and 96 left over; the 3000 that CPU 1 has in stock were not read.
    taken = snapshot(
        charges=ledger({(OBJCG_A, "slab", "reclaimable", 0): (1000, 5)}),
        objcgs={OBJCG_A: Objcg(OBJCG_A, A, 0, False, 96)},
        memcg_stats={m: {"MEMCG_KMEM": Stat(int(m in (ROOT, A)), 0, 0)} for m in family()},
        features=features("MEMCG_KMEM"),
        usage={ROOT: 9, A: 1, B: 0},
        coverage={"stock": Coverage(1, 1)},
    )
    assert {row.status for row in rule(taken)} == {"unverifiable"}


@pytest.mark.parametrize("missing", ["stock", "slab"])
@pytest.mark.parametrize("bytes_", [PAGE - 1, PAGE, PAGE + 1])
def test_whole_pages_with_bytes_that_were_not_read(missing: str, bytes_: int) -> None:
    """What is missing completes a page, or goes beyond it."""
    charges = ledger({(OBJCG_A, "slab", "reclaimable", 0): (bytes_, 5)})
    if missing == "slab":
        charges.note_missing("slab")
    [row] = objcg_rows(
        snapshot(
            charges=charges,
            objcgs={OBJCG_A: Objcg(OBJCG_A, A, 0, False, 0)},
            coverage={"stock": Coverage(2, int(missing == "stock"))},
        )
    )
    assert (row.status, row.difference) == ("unverifiable", PAGE - bytes_)


def test_hierarchy_row_knows_what_is_missing_below() -> None:
    # /a/b's 1000 bytes are in slabs that are missing; /a has more than it claims: 8 bytes, or so
    # many that the whole subtree has more, too.
    stats = zero(family(), (0,))
    for memcg in (ROOT, A, B):
        stats[memcg, 0] = {RECLAIMABLE: Stat(1000, 0, 0), UNRECLAIMABLE: Stat(0, 0, 0)}
    for size in (8, 1008):
        charges = ledger({(OBJCG_A, "slab", "reclaimable", 0): (size, 1)})
        charges.note_missing("slab")
        taken = snapshot(charges=charges, lruvec_stats=stats, nodes=(0,))
        rows = slab_rows(taken)
        assert {(r.memcg, r.difference) for r in rows if r.status == "differs"} == {(A, -size)}
        above = {r.memcg: r for r in hierarchy_rows(taken, rows) if r.item == RECLAIMABLE}
        assert (above[A].status, above[A].reason, above[A].difference) == (
            "unverifiable",
            "objcgs of slabs on this node are not in the image",
            1000 - size,
        )


def test_unknown_compound_page_may_be_no_large_kmalloc() -> None:
    # Kernels that do not mark them: owners of other compound pages could not all be read.
    taken = snapshot(
        charges=ledger({(OBJCG_A, "kmem", "large_kmalloc", 0): (8192, 1)}),
        features=features(large_kmalloc_type=False),
        coverage={"compound": Coverage(3, 1)},
    )
    rows = {(row.memcg, row.nid, row.item): row for row in slab_rows(taken)}
    assert "differs" not in {row.status for row in rows.values()}
    assert rows[A, 0, UNRECLAIMABLE].reason == (
        "owners of compound pages, which tell them from large kmallocs, are not in the image"
    )


def test_skew_is_between_nodes() -> None:
    assert all(cell.backing_nid >= 0 for cell in skew_matrix(image()))


def incomplete(lru_holds_objcg: bool = True, whole: bool = False) -> Snapshot:
    """Return charges to addresses that are not known; some obj_cgroups could not be read."""
    charges = {
        (OBJCG_A, "slab", "reclaimable", 0): (1000, 5),
        (0xBAD, "slab", "unreclaimable", 1): (64, 1),
        (0xBAD, "lru", "lru", 1): (4096, 1),
        # sockets are charged to memcgs
        (0xBAD, "sock", "TCP", -1): (4096, 1),
    }
    return snapshot(
        charges=ledger(charges),
        features=features(lru_holds_objcg=lru_holds_objcg),
        coverage={"objcgs": Coverage(3, 0 if whole else 1)},
    )


def test_charges_of_obj_cgroups_that_were_not_read_may_be_anybodys() -> None:
    taken = incomplete()
    reason = "slab memory is charged to obj_cgroups that are not in the image"
    for detail in (None, "unreclaimable"):
        for nid in (None, 1):
            assert taken.why_missing("slab", detail, nid) == reason
    assert taken.why_missing("slab", "unreclaimable", 0) is None
    assert taken.why_missing("slab", "reclaimable", 1) is None
    assert taken.why_missing("percpu") is None


def test_charges_to_a_memcg_itself_are_nobody_elses() -> None:
    assert incomplete().why_missing("sock") is None
    # since 7.1 user pages are charged to obj_cgroups
    assert incomplete().why_missing("lru") is not None
    assert incomplete(lru_holds_objcg=False).why_missing("lru") is None


def test_charges_to_unknown_addresses_are_orphans_where_everything_was_read() -> None:
    taken = incomplete(whole=True)
    assert [taken.why_missing(kind) for kind in ("slab", "lru", "sock")] == [None] * 3


def test_reasons_name_what_could_not_be_read() -> None:
    charges = ledger({})
    charges.note_missing("slab", "reclaimable", 1)
    reasons = {
        (row.nid, row.item): row.reason
        for row in slab_rows(snapshot(charges=charges))
        if row.memcg == A
    }
    assert reasons == {
        (0, RECLAIMABLE): None,
        (0, UNRECLAIMABLE): None,
        (1, RECLAIMABLE): "objcgs of slabs on this node are not in the image",
        (1, UNRECLAIMABLE): None,
    }
    rows = slab_rows(snapshot(coverage={"stock": Coverage(1, 1)}))
    assert {row.reason for row in rows} == {"object stocks are not all in the image"}
    stats = {key: value for key, value in zero(family(), (0, 1)).items() if key != (B, 0)}
    unread = {row.reason for row in slab_rows(snapshot(lruvec_stats=stats)) if row.nid == 0}
    assert unread == {"its counter, or that of a memcg below it, is not in the image", None}
    partial = {m: replace(memcg, whole=m != B) for m, memcg in family().items()}
    rows = slab_rows(snapshot(memcgs=partial))
    assert {row.memcg: row.reason for row in rows} == {
        **dict.fromkeys((ROOT, A)),
        B: "memcgs below this one, which its counter includes, are not all in the image",
    }


def test_a_subtree_whose_counters_are_not_all_known() -> None:
    """``/a`` has counters of its own, and those that ``/a/dead`` left are not in the image."""
    taken = image()
    rows = kmem_rows(taken)
    stats = {m: stats for m, stats in MEMCG_STATS.items() if m != DEAD}
    lost = {row.memcg: row for row in hierarchy_rows(image(memcg_stats=stats), rows)}
    told = ("unverifiable", "counters of its subtree are not all in the image", None)
    assert {(r.status, r.reason, r.claimed) for r in lost.values()} == {told}
    assert {row.found["subtree"] for row in lost.values()} == {27}


def test_vectors_of_slabs_that_could_not_be_read() -> None:
    """One that is dangling is a finding all the same."""
    charges = ledger({})
    charges.note_missing("slab", None, 1)
    vectors = {0: Vectors(5, 2), 1: Vectors(3, 1)}
    rows = placement_rows(snapshot(charges=charges, vectors=vectors))
    assert [(row.nid, row.status, row.reason) for row in rows] == [
        (0, "exact", None),
        (1, "unverifiable", "slabs on this node are not all in the image"),
    ]
    vectors[1] = Vectors(3, 1, ((0xF00, 0, 0xE00),))
    rows = placement_rows(snapshot(charges=charges, vectors=vectors))
    assert [row.status for row in rows] == ["exact", "differs"]


def test_sockets_of_memcgs_that_could_not_be_read() -> None:
    """Removed memcgs below ``/a`` had sockets, which are its own now."""
    partial = {m: replace(memcg, whole=m != A) for m, memcg in family().items()}
    sockets = {m: SockUsage(2) for m in (A, B)}
    rows = sock_bytes_rows(snapshot(memcgs=partial, sockets=sockets))
    assert {row.memcg: (row.status, row.reason) for row in rows} == {
        A: (
            "unverifiable",
            "removed memcgs below this one, whose sockets it has, may not be in the image",
        ),
        B: ("exact", None),
    }


def test_counters_of_nodes_that_could_not_be_read() -> None:
    """The total of all nodes cannot be too much, or too little, then."""
    for total in (9, 11):
        taken = snapshot(
            all_nodes=Nodes(totals={"NR_SHMEM": total, "NR_KERNEL_STACK_KB": 0}),
            node_stats={(0, "NR_SHMEM"): NodeStat(10, 3), (1, "NR_FILE_PAGES"): NodeStat(7, 0)},
        )
        [row] = node_total_rows(taken)
        assert (row.found, row.claimed) == ({"nodes": 10}, {"vm_node_stat": total})
        assert (row.item, row.unit, row.status) == ("NR_SHMEM", "pages", "differs")
        rows = node_total_rows(replace(taken, coverage={"node_stats": Coverage(1, 1)}))
        assert [(row.item, row.unit, row.status, row.reason) for row in rows] == [
            ("NR_SHMEM", "pages", "unverifiable", "counters of nodes are not in the image"),
            ("NR_KERNEL_STACK_KB", "KiB", "unverifiable", "counters of nodes are not in the image"),
        ]


@pytest.mark.parametrize(
    ("subject", "vmalloc", "stacks"),
    [("stacks", "unverifiable", "differs"), ("vmalloc", "differs", "differs")],
)
def test_a_stack_that_was_not_read_is_counted_as_another_area(
    subject: str, vmalloc: str, stacks: str
) -> None:
    """More than the counter may then be found of other areas, but not of stacks."""
    # one page more of each than the counters of node 0 say
    charges = {
        **CHARGES,
        (OBJCG_A, "kmem", "stack", 0): (13 * PAGE, 13),
        (OBJCG_A, "kmem", "vmalloc", 0): (6 * PAGE, 6),
    }
    taken = image(charges=ledger(charges), coverage={subject: Coverage(5, 1)})

    def status(rows: list[Row]) -> str:
        [row] = [row for row in rows if (row.memcg, row.nid) == (A, 0)]
        return row.status

    assert (status(vmalloc_rows(taken)), status(stack_rows(taken))) == (vmalloc, stacks)
    # too little may be missing
    less = image(charges=ledger({}), coverage={subject: Coverage(5, 1)})
    assert (status(vmalloc_rows(less)), status(stack_rows(less))) == ("unverifiable",) * 2


@pytest.mark.parametrize(
    ("gone", "expected"), [(0, "differs"), (3, "differs"), (4, "unverifiable"), (5, "unverifiable")]
)
def test_pages_that_were_freed_before_their_use_was_known(gone: int, expected: str) -> None:
    """They may have been a stack. Pages on another node were none of this node's."""
    charges = {
        **CHARGES,
        (OBJCG_A, "kmem", "stack", 0): (8 * PAGE, 8),
        (OBJCG_A, "kmem", GONE, 0): (gone * PAGE, gone),
        (OBJCG_A, "kmem", GONE, 1): (9 * PAGE, 9),
    }
    taken = image(charges=ledger(charges))
    stacks = stack_rows(taken)
    rows = {(row.memcg, row.nid): row.status for row in stacks}
    assert rows[A, 0] == expected
    assert rows[A, 1] == "exact"
    whole = hierarchy_rows(taken, stacks)
    assert {row.status for row in whole if (row.memcg, row.nid) == (A, 0)} <= {expected}
    assert {row.status for row in whole if row.nid == 0} == {expected}


def test_pages_that_were_freed_were_no_page_tables() -> None:
    """Only those of vmalloc areas are looked up after what is read first."""
    for number in (1, 3):
        table = (OBJCG_A, "kmem", "table", 1)
        charges = {**CHARGES, (OBJCG_A, "kmem", GONE, 1): (number * PAGE, number)}
        charges.pop(table)
        rows = pagetable_rows(image(charges=ledger(charges)))
        [row] = [row for row in rows if (row.memcg, row.nid) == (A, 1)]
        assert (row.status, row.difference) == ("differs", 1)


@pytest.mark.parametrize(
    ("difference", "most", "is_doubted"),
    [(1, 1, True), (2, 1, False), (0, 1, False), (-1, 1, False), (1, 0, False)],
)
def test_as_many_pages_as_are_gone(difference: int, most: int, is_doubted: bool) -> None:
    key = RowKey("vmalloc", "NR_VMALLOC", "pages", A, 0)
    row = make_row(key, {"vmalloc": 4}, {"folded": 4 + difference})
    assert (gone_pages(row, most) is not None) == is_doubted


STOCKS, TASKS = "object stocks are not all in the image", "tasks are not all in the image"
AREAS = "vmalloc areas are not all in the image"
TOLD = "tasks, whose stacks are told from other vmalloc areas, are not all in the image"
OF_STOCKS = ("slab", "kmem", "objcg_bytes", "usage", "references", "hierarchy")
OF_AREAS = ("kernel_stack", "vmalloc", "hierarchy")

#: What could not be read, and which identities are unverifiable because of it, with the reason.
REASONS: dict[str, dict[str, str]] = {
    "charge_stock": dict.fromkeys(("usage", "css_refs"), "charge stocks are not all in the image"),
    "moving": {"usage": "what a task moves to another memcg is not in the image"},
    "memcgs": {
        "css_refs": "memcgs, which hold references to their parents, are not all in the image"
    },
    "stacks": dict.fromkeys(OF_AREAS, TOLD),
    "vmalloc": dict.fromkeys(OF_AREAS, AREAS),
    "stock": dict.fromkeys(OF_STOCKS, STOCKS),
    "swap_ids": {"id_refs": "the memcgs of swap entries are not all in the image"},
    "tasks": dict.fromkeys(("references", "active_memcg"), TASKS),
    # Nothing here needs these.
    **{name: {} for name in ("cached_stacks", "compound", "lru_walks", "node_stats", "objcgs")},
    **{name: {} for name in ("pages", "slab_pages")},
}


@pytest.mark.parametrize("subject", REASONS)
def test_every_identity_says_what_it_misses(subject: str) -> None:
    """The others are as exact as if everything had been read."""

    def outcomes(taken: Snapshot) -> dict[str, tuple[str, str | None]]:
        return {i.name: (i.status, i.reason) for i in judge(taken).identities}

    whole = outcomes(image())
    partly = outcomes(image(coverage={subject: Coverage(5, 1)}))
    # The counters of slabs are not in this snapshot.
    expected = {name: ("unverifiable", reason) for name, reason in REASONS[subject].items()}
    assert partly == whole | expected
    assert {status for name, (status, _) in whole.items() if name in expected} <= {
        "exact",
        "unverifiable",
    }
    assert sum(status == "exact" for status, _ in whole.values()) >= 17


@pytest.mark.parametrize(
    ("use", "subject", "reason"),
    [
        ("table", "pages", "struct pages are not in the image"),
        ("stack", "pages", "struct pages are not in the image"),
        ("stack", "stacks", "tasks, or their stacks, are not all in the image"),
        ("stack", "vmalloc", "tasks, or their stacks, are not all in the image"),
        ("vmalloc", "vmalloc", "vmalloc areas are not all in the image"),
        ("vmalloc", "stacks", None),
        ("table", "stacks", None),
        ("table", "vmalloc", None),
    ],
)
def test_what_pages_of_nodes_may_be_missing(use: NodeUse, subject: str, reason: str | None) -> None:
    taken = snapshot(coverage={subject: Coverage(5, 1)})
    assert why_not_all_pages(taken, use) == reason
    assert why_not_all_pages(snapshot(), use) is None


def test_references_of_memcgs_that_could_not_be_read() -> None:
    """They hold references to their obj_cgroups. What else is missing is said first."""
    reason = "memcgs, which hold references to their obj_cgroups, are not all in the image"

    def reasons(**more: Any) -> dict[int | None, str | None]:
        return {row.objcg: row.reason for row in reference_rows(image(**more))}

    assert reasons() == dict.fromkeys((OBJCG_A, OBJCG_B, OBJCG_DEAD))
    of_b = {"unreadable": frozenset({B})}
    assert reasons(**of_b) == {OBJCG_A: None, OBJCG_B: reason, OBJCG_DEAD: None}
    first = reasons(**of_b, coverage={"tasks": Coverage(1, 1)})
    assert set(first.values()) == {TASKS}


@pytest.mark.parametrize(
    ("subject", "holders"), [("stock", "object stocks"), ("tasks", "tasks"), ("bpf", "BPF maps")]
)
def test_holders_of_references_that_could_not_be_read(subject: str, holders: str) -> None:
    rows = reference_rows(image(coverage={subject: Coverage(1, 1)}))
    assert {row.reason for row in rows} == {f"{holders} are not all in the image"}


def test_memcgs_that_are_being_freed_and_could_not_be_read() -> None:
    """They may hold references: a count that is higher than what was found says nothing then."""
    refs = {o: (objcg.refs or 0) for o, objcg in image().objcgs.items()}

    def status(more: int, *unread: int) -> tuple[str, str | None]:
        objcgs = image().objcgs
        changed = {OBJCG_A: replace(objcgs[OBJCG_A], refs=refs[OBJCG_A] + more)}
        coverage = {"released": Coverage(0, *unread)}
        rows = reference_rows(image(objcgs={**objcgs, **changed}, coverage=coverage))
        [row] = [row for row in rows if row.objcg == OBJCG_A]
        return row.status, row.reason

    assert status(1) == ("differs", None)
    reason = "memcgs that are being freed, which may hold references, are not all in the image"
    assert status(1, 1) == ("unverifiable", reason)
    assert status(2, 1) == ("differs", None)  # each holds one reference to it
    assert status(0, 1) == ("exact", None)
    assert status(-1, 1) == ("differs", None)


@pytest.mark.parametrize("kind", ["kmem", "lru", "slab", "percpu", "zswap"])
def test_charges_that_hold_references_and_could_not_be_read(kind: ChargeKind) -> None:
    charges = ledger(CHARGES)
    charges.note_missing(kind)
    rows = reference_rows(image(charges=charges))
    assert {row.reason for row in rows} == {f"{kind} memory is not all in the image"}


def test_kernel_memory_of_one_memcg_may_be_missing() -> None:
    """An obj_cgroup of ``/a/b`` could not be read: what it pays for is not known."""
    taken = image(unreadable=frozenset({B}))
    reason = "its obj_cgroups are not all in the image"
    assert {row.memcg: row.reason for row in kmem_rows(taken)} == {ROOT: None, A: None, B: reason}
