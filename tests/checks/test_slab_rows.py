# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``slab`` on snapshots made by hand."""

from __future__ import annotations

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
    ledger,
    snapshot,
    zero,
)

from memcg_inspect.checks.identities.slab import slab_rows
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, Objcg, ObjStock, Stat
from memcg_inspect.report import Row

CHARGES = {
    (OBJCG_A, "slab", "reclaimable", 0): (600, 3),
    (OBJCG_A, "slab", "reclaimable", 1): (200, 1),
    (OBJCG_DEAD, "slab", "reclaimable", 0): (400, 2),
    (OBJCG_B, "slab", "unreclaimable", 0): (1000, 5),
    (OBJCG_B, "kmem", "large_kmalloc", 0): (16384, 1),
    # pages that are no slab memory
    (OBJCG_B, "kmem", "other", 0): (4096, 1),
}


def stats() -> dict[tuple[int, int], dict[str, Stat]]:
    """
    Return counters that match those charges and :data:`STOCKS`.

    /a reclaimable on node 0: 600 of its own and 400 of the removed one = 1000. Folded 700,
    waiting 50 in /a and 150 in /a/dead, in the stock 100.
    /a/b unreclaimable on node 0: 1000 + 16384 = 17384, of which 17000 folded, 384 waiting.
    """
    made = zero(family(), (0, 1))
    made[ROOT, 0] = {RECLAIMABLE: Stat(700, 0, 0), UNRECLAIMABLE: Stat(17000, 0, 0)}
    made[A, 0] = {RECLAIMABLE: Stat(700, 20, 30), UNRECLAIMABLE: Stat(17000, 0, 0)}
    made[A, 1] = {RECLAIMABLE: Stat(0, 0, 200), UNRECLAIMABLE: Stat(0, 0, 0)}
    made[DEAD, 0] = {RECLAIMABLE: Stat(250, 100, 50), UNRECLAIMABLE: Stat(0, 0, 0)}
    made[B, 0] = {RECLAIMABLE: Stat(0, 0, 0), UNRECLAIMABLE: Stat(17000, 0, 384)}
    return made


STOCKS = [
    # CPU 0 holds 100 of the removed memcg's bytes, which are /a's now.
    ObjStock(0, 0, OBJCG_DEAD, 3000, 0, 100, 0, False),
    ObjStock(0, 1, OBJCG_B, 500, None, 0, 0, False),
]


def image(**other: object) -> Snapshot:
    what = {"charges": ledger(CHARGES), "lruvec_stats": stats(), "stocks": STOCKS, **other}
    return snapshot(**what)  # type: ignore[arg-type]


def the(rows: list[Row], memcg: int, nid: int, item: str) -> Row:
    [row] = [r for r in rows if (r.memcg, r.nid, r.item) == (memcg, nid, item)]
    return row


def test_every_live_memcg_node_and_item_has_a_row() -> None:
    rows = slab_rows(image())
    assert len(rows) == 3 * 2 * 2
    assert {row.memcg for row in rows} == {ROOT, A, B}
    assert {row.status for row in rows} == {"exact"}


def test_removed_memcgs_objects_and_stock_are_its_payers() -> None:
    row = the(slab_rows(image()), A, 0, RECLAIMABLE)
    assert row.found == {"slab": 1000}
    # folded 700 - 0 of /a/b; waiting 20 + 30 + 100 + 50
    assert row.claimed == {"folded": 700, "pending_cpu": 200, "stock": 100}
    assert row.hierarchy == 700
    assert row.difference == 0


def test_large_kmallocs_are_unreclaimable_slab() -> None:
    row = the(slab_rows(image()), B, 0, UNRECLAIMABLE)
    assert row.found == {"slab": 1000, "large_kmalloc": 16384}
    assert row.claimed == {"folded": 17000, "pending_cpu": 384, "stock": 0}


def test_nodes_stand_apart() -> None:
    row = the(slab_rows(image()), A, 1, RECLAIMABLE)
    assert row.found == {"slab": 200}
    assert row.claimed == {"folded": 0, "pending_cpu": 200, "stock": 0}


def test_one_byte_off_is_off() -> None:
    wrong = stats()
    wrong[B, 0] = {**wrong[B, 0], UNRECLAIMABLE: Stat(17001, 0, 384)}
    rows = slab_rows(image(lruvec_stats=wrong))
    differing = {(r.memcg, r.nid, r.item): r.difference for r in rows if r.status == "differs"}
    # /a/b has one byte too much, and /a, whose share is what /a/b leaves, one too few
    assert differing == {(B, 0, UNRECLAIMABLE): 1, (A, 0, UNRECLAIMABLE): -1}


def test_objects_of_no_known_objcg_count_for_nobody() -> None:
    charges = ledger({**CHARGES, (0xBAD, "slab", "reclaimable", 0): (512, 1)})
    assert {row.status for row in slab_rows(image(charges=charges))} == {"exact"}


def test_stock_of_no_known_objcg_counts_for_nobody() -> None:
    stocks = [*STOCKS, ObjStock(1, 0, 0xBAD, 0, 0, 64, 64, False)]
    assert {row.status for row in slab_rows(image(stocks=stocks))} == {"exact"}


def test_stock_that_could_not_be_read_leaves_nothing_verified() -> None:
    rows = slab_rows(image(coverage={"stock": Coverage(1, 1)}))
    assert {row.status for row in rows} == {"unverifiable"}
    assert all(row.claimed is None for row in rows)


def test_missing_charges_touch_their_node_and_kind_only() -> None:
    charges = ledger(CHARGES)
    charges.note_missing("slab", "reclaimable", 1)
    rows = slab_rows(image(charges=charges))
    unverifiable = {(row.nid, row.item) for row in rows if row.status == "unverifiable"}
    assert unverifiable == {(1, RECLAIMABLE)}
    assert {row.status for row in rows} == {"exact", "unverifiable"}
    assert all(row.reason for row in rows if row.status == "unverifiable")


def test_missing_kmem_pages_hide_large_kmallocs() -> None:
    charges = ledger(CHARGES)
    charges.note_missing("kmem")
    rows = slab_rows(image(charges=charges))
    assert {row.item for row in rows if row.status == "unverifiable"} == {UNRECLAIMABLE}


def test_more_than_claimed_is_a_finding_in_spite_of_missing_charges() -> None:
    charges = ledger({**CHARGES, (OBJCG_A, "slab", "reclaimable", 1): (264, 2)})
    charges.note_missing("slab")
    rows = slab_rows(image(charges=charges))
    differing = {(row.memcg, row.nid, row.difference) for row in rows if row.status == "differs"}
    assert differing == {(A, 1, 200 - 264)}


def test_unreadable_counters_of_a_memcg_leave_the_others_verified() -> None:
    read = {key: value for key, value in stats().items() if key != (A, 0)}
    rows = slab_rows(image(lruvec_stats=read))
    assert the(rows, A, 0, RECLAIMABLE).status == "unverifiable"
    assert the(rows, A, 0, RECLAIMABLE).hierarchy is None
    assert the(rows, A, 1, RECLAIMABLE).status == "exact"
    assert the(rows, B, 0, UNRECLAIMABLE).status == "exact"


def test_charges_to_a_memcg_itself_count_like_an_objcgs() -> None:
    taken = image(objcgs={OBJCG_A: Objcg(OBJCG_A, A, 0, False, 0)})
    assert taken.payer(OBJCG_A) == A
    assert taken.payer(B) == B
    assert taken.payer(DEAD) == A
    assert taken.payer(OBJCG_B) is None


def test_what_a_stock_holds_back_of_either_kind() -> None:
    """A stock that has no node holds back nothing, and none belongs to a freed obj_cgroup."""
    stocks = [
        ObjStock(0, 0, OBJCG_B, 0, 0, 0, 24, False),
        ObjStock(1, 0, OBJCG_B, 0, None, 0, 0, False),
        ObjStock(1, 1, 0xBAD, 0, 0, 8, 8, False),
    ]
    rows = slab_rows(snapshot(stocks=stocks))
    held = {
        (row.memcg, row.nid, row.item): row.claimed["stock"]
        for row in rows
        if row.claimed and row.claimed["stock"]
    }
    assert held == {(B, 0, UNRECLAIMABLE): 24}


def test_objects_or_large_kmallocs_that_could_not_be_read() -> None:
    """They may be what the counter claims more than was found."""
    both = {RECLAIMABLE, UNRECLAIMABLE}
    kinds: tuple[ChargeKind, ...] = ("kmem", "slab")
    for kind, items in zip(kinds, ({UNRECLAIMABLE}, both), strict=True):
        charges = ledger({entry: n for entry, n in CHARGES.items() if entry[1] != kind})
        charges.note_missing(kind)
        rows = slab_rows(image(charges=charges))
        assert {row.item for row in rows if row.status == "unverifiable"} == items
