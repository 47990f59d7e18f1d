# SPDX-License-Identifier: LGPL-2.1-or-later
"""An identity makes no false finding where something that it needs could not be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.made import (
    OBJCG_A,
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
from support.made_charges import CHARGES, PAGE, image

from memcg_inspect.checks.identities.hierarchy import hierarchy_rows
from memcg_inspect.checks.identities.kernel_stack import stack_rows
from memcg_inspect.checks.identities.kmem import kmem_rows
from memcg_inspect.checks.identities.slab import slab_rows
from memcg_inspect.checks.identities.usage import usage_rows
from memcg_inspect.checks.identities.vmalloc import vmalloc_rows
from memcg_inspect.checks.skew import skew_matrix
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, Objcg, Stat
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


def test_hierarchy_row_knows_what_is_missing_below() -> None:
    # /a/b's 1000 bytes are in slabs that are missing; /a has 8 bytes more than it claims.
    stats = zero(family(), (0,))
    for memcg in (ROOT, A, B):
        stats[memcg, 0] = {RECLAIMABLE: Stat(1000, 0, 0), UNRECLAIMABLE: Stat(0, 0, 0)}
    charges = ledger({(OBJCG_A, "slab", "reclaimable", 0): (8, 1)})
    charges.note_missing("slab")
    taken = snapshot(charges=charges, lruvec_stats=stats, nodes=(0,))
    rows = slab_rows(taken)
    assert {(r.memcg, r.difference) for r in rows if r.status == "differs"} == {(A, -8)}
    above = {r.memcg: r.status for r in hierarchy_rows(taken, rows) if r.item == RECLAIMABLE}
    assert above[A] == "unverifiable"


def test_unknown_compound_page_may_be_no_large_kmalloc() -> None:
    # Kernels that do not mark them: owners of other compound pages could not all be read.
    taken = snapshot(
        charges=ledger({(OBJCG_A, "kmem", "large_kmalloc", 0): (8192, 1)}),
        features=features(large_kmalloc_type=False),
        coverage={"compound": Coverage(3, 1)},
    )
    assert "differs" not in {row.status for row in slab_rows(taken)}


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
