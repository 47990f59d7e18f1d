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
from support.made_charges import image

from memcg_inspect.checks.identities.hierarchy import hierarchy_rows
from memcg_inspect.checks.identities.kmem import kmem_rows
from memcg_inspect.checks.identities.slab import slab_rows
from memcg_inspect.checks.identities.usage import usage_rows
from memcg_inspect.checks.skew import skew_matrix
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, Objcg, Row, Stat


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
