# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``lru`` on snapshots made by hand."""

from __future__ import annotations

from typing import Any

from support.made import DEAD, OBJCG_A, OBJCG_DEAD, ROOT, A, B, snapshot

from memcg_inspect.checks.identities.lru import lru_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.ledger import Ledger
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, LruLists
from memcg_inspect.report import Row

ACTIVE = "lru_zone_size[ZONE_NORMAL][LRU_ACTIVE_ANON]"
INACTIVE = "lru_zone_size[ZONE_NORMAL][LRU_INACTIVE_ANON]"
GENERATION = "lrugen.nr_pages[2][LRU_GEN_FILE][ZONE_NORMAL]"
BY_TYPE = "all lists of LRU_GEN_ANON in ZONE_NORMAL"

#: 7 pages of A on node 0, 6 of them of the removed memcg, whose objcg A has; 5 of B.
PAGES = {(OBJCG_A, 0, ACTIVE): 1, (OBJCG_DEAD, 0, ACTIVE): 6, (B, 1, GENERATION): 5}
SIZES: dict[tuple[int, int], dict[str, dict[str, int]]] = {
    **{(memcg, nid): {} for memcg in (ROOT, A, B, DEAD) for nid in (0, 1)},
    (A, 0): {ACTIVE: {"lru_zone_size": 7}},
    (B, 1): {GENERATION: {"nr_pages": 4, "mm_walk": 1}},
}


def image(
    pages: dict[tuple[int, int, str], int] | None = None,
    sizes: dict[tuple[int, int], dict[str, dict[str, int]]] | None = None,
    by_generation: bool = True,
    **more: Any,
) -> Snapshot:
    lists = LruLists(
        PAGES if pages is None else pages, SIZES if sizes is None else sizes, by_generation
    )
    return snapshot(lru=lists, **more)


def by_cell(rows: list[Row]) -> dict[tuple[int | None, int | None, str], Row]:
    return {(row.memcg, row.nid, row.item): row for row in rows}


def test_pages_and_sizes_agree() -> None:
    rows = by_cell(lru_rows(image()))
    assert {key: row.status for key, row in rows.items()} == {
        (A, 0, ACTIVE): "exact",
        (B, 1, GENERATION): "exact",
    }
    assert rows[A, 0, ACTIVE].found == {"lru": 7}
    assert rows[B, 1, GENERATION].claimed == {"nr_pages": 4, "mm_walk": 1}
    assert {row.unit for row in rows.values()} == {"pages"}
    assert {row.reason for row in rows.values()} == {None}
    assert lru_rows(snapshot(lru=None)) == []


def test_a_folio_says_another_list_than_the_one_that_counts_it() -> None:
    rows = by_cell(lru_rows(image(sizes={**SIZES, (A, 0): {INACTIVE: {"lru_zone_size": 7}}})))
    assert rows[A, 0, ACTIVE].difference == -7
    assert rows[A, 0, ACTIVE].claimed == {"lru_zone_size": 0}
    assert rows[A, 0, INACTIVE].difference == 7
    assert rows[A, 0, INACTIVE].found == {"lru": 0}


def test_generation_without_a_size() -> None:
    rows = by_cell(lru_rows(image(sizes={**SIZES, (B, 1): {}})))
    assert rows[B, 1, GENERATION].claimed == {"nr_pages": 0}
    assert rows[B, 1, GENERATION].difference == -5


def test_pages_of_a_removed_memcg_stay_on_its_own_lists() -> None:
    """Up to 7.0 pages point to memcgs, and pin them."""
    sizes = {**SIZES, (A, 0): {}, (DEAD, 0): {ACTIVE: {"lru_zone_size": 3}}}
    rows = by_cell(lru_rows(image({(DEAD, 0, ACTIVE): 3}, {**sizes, (B, 1): {}})))
    assert [(*key, row.status) for key, row in rows.items()] == [(DEAD, 0, ACTIVE, "exact")]


def test_pages_charged_to_nobody_are_on_the_roots_lists() -> None:
    sizes = {**SIZES, (A, 0): {}, (B, 1): {}, (ROOT, 1): {ACTIVE: {"lru_zone_size": 2}}}
    rows = by_cell(lru_rows(image({(0, 1, ACTIVE): 2}, sizes)))
    assert [(*key, row.status) for key, row in rows.items()] == [(ROOT, 1, ACTIVE, "exact")]


def test_pages_charged_to_what_is_no_memcg_are_on_no_list() -> None:
    rows = by_cell(lru_rows(image({**PAGES, (0xBAD, 0, ACTIVE): 1})))
    assert {row.status for row in rows.values()} == {"exact"}


def test_what_could_not_be_read() -> None:
    sizes = {key: size for key, size in SIZES.items() if key != (B, 1)}
    rows = by_cell(lru_rows(image(sizes=sizes)))
    assert rows[B, 1, GENERATION].status == "unverifiable"
    assert rows[B, 1, GENERATION].reason == "the sizes of the LRU lists could not be read"
    assert rows[B, 1, GENERATION].claimed is None
    assert rows[A, 0, ACTIVE].status == "exact"


def test_missing_pages_hide_a_shortage_only() -> None:
    ledger = Ledger()
    ledger.note_missing("lru")
    more = image({(OBJCG_A, 0, ACTIVE): 9, (B, 1, GENERATION): 1}, charges=ledger)
    rows = by_cell(lru_rows(more))
    assert rows[A, 0, ACTIVE].status == "differs"
    assert rows[B, 1, GENERATION].status == "unverifiable"
    assert rows[B, 1, GENERATION].reason == "lru memory is not all in the image"


def test_walks_that_could_not_be_read_hide_generations_both_ways() -> None:
    coverage = Coverage()
    coverage.miss("task", 0x10, "not in the image")
    pages = {(OBJCG_A, 0, ACTIVE): 8, (B, 1, GENERATION): 9}
    rows = by_cell(lru_rows(image(pages, coverage={"lru_walks": coverage})))
    assert rows[A, 0, ACTIVE].status == "differs"
    assert rows[B, 1, GENERATION].status == "unverifiable"
    assert rows[B, 1, GENERATION].reason == (
        "tasks, whose walks of page tables move folios, are not all in the image"
    )


def test_rows_say_that_generations_could_not_be_told() -> None:
    sizes = {(A, 0): {BY_TYPE: {"nr_pages": 2, "lru_zone_size": 1}}}
    (row,) = lru_rows(image({(OBJCG_A, 0, BY_TYPE): 3}, sizes, by_generation=False))
    assert row.status == "exact"
    assert row.reason == (
        "the generation of a folio is not where it was expected: lists are compared by type"
    )


def test_not_kept_where_nothing_was_read() -> None:
    (identity,) = (i for i in judge(snapshot()).identities if i.name == "lru")
    assert identity.status == "not-kept"
    assert identity.reason
    (identity,) = (i for i in judge(image()).identities if i.name == "lru")
    assert (identity.status, identity.rows) == ("exact", 2)


def test_a_wrong_size_is_a_finding_of_that_list_alone() -> None:
    wrong = image(sizes={**SIZES, (A, 0): {ACTIVE: {"lru_zone_size": 10}}})
    findings = [
        pending.finding for pending in judge(wrong).findings if pending.finding.identity == "lru"
    ]
    assert [(f.memcg, f.nid, f.item, f.difference) for f in findings] == [(A, 0, ACTIVE, 3)]
