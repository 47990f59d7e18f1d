# SPDX-License-Identifier: LGPL-2.1-or-later
"""The status of rows, the outcome of identities, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made import RECLAIMABLE, A, family, snapshot

from memcg_inspect.checks.judge import verdict
from memcg_inspect.checks.rows import Missing, RowKey, counter_row, make_row, summarize
from memcg_inspect.model import Coverage, Stat
from memcg_inspect.report import Finding, Identity, Row


def row(
    found: Mapping[str, int] | None = None,
    claimed: Mapping[str, int] | None = None,
    **more: Any,
) -> Row:
    return make_row(
        RowKey("slab", "NR_SLAB_RECLAIMABLE_B", "bytes", 0x1000, 0),
        {"slab": 100} if found is None else found,
        claimed,
        **more,
    )


def test_difference_is_claimed_less_found() -> None:
    # 90 folded + 4 pending + 2 stock = 96 claimed; 80 + 20 = 100 found
    made = row({"slab": 80, "large_kmalloc": 20}, {"folded": 90, "pending_cpu": 4, "stock": 2})
    assert made.difference == -4
    assert made.status == "differs"
    assert made.reason is None


def test_parts_may_be_negative() -> None:
    made = row({"slab": 100}, {"folded": 130, "pending_cpu": 0, "stock": -30})
    assert made.difference == 0
    assert made.status == "exact"


def test_unread_counter_is_none_and_never_zero() -> None:
    made = row({"slab": 100}, None)
    assert made.status == "unverifiable"
    assert made.claimed is None
    assert made.difference is None
    assert made.reason == "the counter could not be read"
    assert row({}, None, unread="its page is not in the image").reason == (
        "its page is not in the image"
    )


@pytest.mark.parametrize(
    ("claimed", "status"),
    [
        # what is missing can only add to the 100 found
        (100, "unverifiable"),
        (101, "unverifiable"),
        # 100 found exceed 99 already: more cannot make them equal
        (99, "differs"),
    ],
)
def test_missing_charges_hide_all_but_too_much(claimed: int, status: str) -> None:
    made = row({"slab": 100}, {"folded": claimed}, missing=Missing("half of it is missing"))
    assert made.status == status
    assert made.reason == ("half of it is missing" if status == "unverifiable" else None)
    assert made.difference == claimed - 100


def outcome(*rows: Row) -> Identity:
    return summarize("slab", rows)


EXACT = row({"slab": 1}, {"folded": 1})
DIFFERS = row({"slab": 1}, {"folded": 2})
UNREAD = row({"slab": 1}, None)
MOVING = Row("slab", 1, None, 0, "X", "bytes", "moving", {"slab": 1}, {"folded": 2})
IN_FLIGHT = Row("slab", 1, None, 0, "X", "bytes", "in-flight", {"slab": 1}, {"folded": 2})


def test_outcome_is_that_of_the_worst_row() -> None:
    assert outcome() == Identity("slab", "exact", 0, 0)
    assert outcome(EXACT, EXACT) == Identity("slab", "exact", 2, 0)
    assert outcome(EXACT, MOVING) == Identity("slab", "moving", 2, 0)
    assert outcome(EXACT, IN_FLIGHT).status == "exact"
    assert outcome(EXACT, UNREAD, MOVING) == Identity(
        "slab", "unverifiable", 3, 0, "the counter could not be read"
    )
    assert outcome(DIFFERS, EXACT, UNREAD, DIFFERS).status == "findings"
    assert outcome(DIFFERS, EXACT, UNREAD, DIFFERS).differing == 2


@given(st.permutations([EXACT, DIFFERS, UNREAD, MOVING, IN_FLIGHT]))
def test_outcome_does_not_depend_on_order(rows: list[Row]) -> None:
    assert outcome(*rows) == outcome(EXACT, DIFFERS, UNREAD, MOVING, IN_FLIGHT)


FINDING = Finding("slab", "skew", 1, None, 0, "slab", "bytes", 8, "what", "proof")


def said(
    *statuses: str, findings: tuple[Finding, ...] = (), read: int = 5, unreadable: int = 0
) -> str:
    identities = [Identity(f"i{n}", s, 1, 0) for n, s in enumerate(statuses)]  # type: ignore[arg-type]
    return verdict(identities, findings, {"pages": Coverage(read, unreadable)})


def test_verdict() -> None:
    assert said("exact", "exact") == "exact"
    assert said("exact", "not-kept") == "exact"
    assert said("exact", "moving") == "moving"
    assert said("exact", "unverifiable") == "incomplete"
    assert said("moving", "unverifiable") == "incomplete"
    # what could not be read counts even if no row needed it
    assert said("exact", unreadable=1) == "incomplete"
    assert said("moving", unreadable=1) == "incomplete"


def test_findings_go_before_everything() -> None:
    assert said("exact", findings=(FINDING,)) == "findings"
    assert said("unverifiable", findings=(FINDING,), unreadable=3) == "findings"
    # A row that differs is no less so if nothing more is found of it.
    assert said("exact", "findings") == "findings"
    assert said("unverifiable", "findings", unreadable=3) == "findings"


def test_coverage_counts_all_and_keeps_few() -> None:
    coverage = Coverage()
    for address in range(25):
        coverage.miss("slab", address, "not in the image")
    assert coverage.unreadable == 25
    assert [example.address for example in coverage.examples] == list(range(10))


def test_a_counter_that_is_zero() -> None:
    key = RowKey("slab", RECLAIMABLE, "bytes", A, 0)
    stats = dict.fromkeys(family(), {RECLAIMABLE: Stat(0, 0, 0)})
    taken = snapshot(memcg_stats=stats)
    sound = counter_row(taken, key, {"slab": 0})
    assert (sound.status, sound.hierarchy) == ("exact", 0)
    more = counter_row(taken, key, {"slab": 8})
    assert (more.status, more.difference) == ("differs", -8)
