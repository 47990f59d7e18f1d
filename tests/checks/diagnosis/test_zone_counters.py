# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which of the places that have a counter of a zone is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.made_rows import Short, options, shown
from support.made_zones import STATS, ZONE, made, with_stat

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Diagnosis

TOTALS = {item: stat.folded for item, stat in STATS.items()}


def diagnosed(taken: Snapshot) -> tuple[Diagnosis, ...]:
    judged = judge(taken)
    return diagnose(taken, judged.rows, [pending.finding for pending in judged.findings], ())


def only(taken: Snapshot) -> tuple[str, int | None, int | None, str]:
    """Return cause, node, amount and words of the only diagnosis."""
    [found] = diagnosed(taken)
    assert found.memcgs == ()
    return found.cause, found.nid, found.amount, found.what


def test_a_zone_at_rest() -> None:
    assert diagnosed(made()) == ()


@pytest.mark.parametrize("amount", [1, -3, 4_000])
@pytest.mark.parametrize("counter", ["NR_FREE_PAGES", "NR_MLOCK", "NR_ZSPAGES"])
def test_the_value_of_a_zone(counter: str, amount: int) -> None:
    """The total of all zones was changed rightly, so it differs from their sum, too."""
    zone = with_stat(counter, amount)
    sums = {**TOTALS, counter: TOTALS[counter] + amount}
    cause, nid, size, what = only(made(zone, totals=TOTALS, sums=sums))
    assert (cause, nid, size) == ("zone-counter", 1, amount)
    assert what.startswith(f"{counter}[ZONE_NORMAL] of node 1 is {abs(amount):,} page")
    side = "high" if amount > 0 else "low"
    assert what.endswith(f"too {side}, in the value of the zone")


def test_the_changes_of_a_cpu() -> None:
    """The total of all zones has none of them, and does not differ."""
    stats = {**STATS, "NR_MLOCK": STATS["NR_MLOCK"]._replace(cpus=-4)}
    cause, nid, size, what = only(made(ZONE._replace(stats=stats)))
    assert (cause, nid, size) == ("zone-counter", 1, -5)
    assert what == "NR_MLOCK[ZONE_NORMAL] of node 1 is 5 pages too low, in a CPU's changes"


@pytest.mark.parametrize("amount", [2, -7])
def test_the_total_of_all_zones(amount: int) -> None:
    """No pages are compared with it, so it is one of the two."""
    totals = {**TOTALS, "NR_ZSPAGES": TOTALS["NR_ZSPAGES"] + amount}
    found = diagnosed(made(totals=totals))
    assert [d.cause for d in found] == ["zone-counter"]
    assert (found[0].nid, found[0].amount) == (None, amount)
    side = "high" if amount > 0 else "low"
    wanted = f"NR_ZSPAGES is {abs(amount)} pages too {side}, in the total of all zones"
    assert found[0].what == wanted


@pytest.mark.parametrize("blocks", [1, -1])
def test_the_number_of_blocks_on_a_list(blocks: int) -> None:
    zone = ZONE._replace(free_blocks=(3, 0, 2 + blocks))
    cause, nid, size, what = only(made(zone))
    assert (cause, nid, size) == ("zone-counter", 1, 4 * blocks)
    assert what.startswith("free_area[ZONE_NORMAL][2] of node 1 is 4 pages too ")
    assert what.endswith("in the number of blocks on the list")


@pytest.mark.parametrize("more", [{"free": {(1, 2, 0): 3, (1, 2, 2): 1}}, {"free": {(1, 2, 0): 3}}])
def test_pages_that_lost_their_type(more: dict[str, Any]) -> None:
    """They are on the list, and counted as free, but not marked: two rows, one cause."""
    missing = 4 * (2 - more["free"].get((1, 2, 2), 0))
    cause, nid, size, what = only(made(**more))
    assert (cause, nid, size) == ("zone-counter", 1, missing)
    assert what.endswith(f"is {missing} pages too high, in the type of pages")


def said(
    off: dict[Short, int], same: Sequence[Short] = ()
) -> list[tuple[str, int | None, int, dict[Short, int]]]:
    """Return place, node, amount and effects of what explains the first of some rows."""
    return [(h.place, h.nid, h.amount, shown(h.signature)) for h in options(made(), off, same)]


def test_the_value_of_a_zone_is_suggested_by_either_row() -> None:
    """The total of all zones may be hidden by another fault, which is found beside it."""
    zone, total = (
        ("zone_free", "NR_FREE_PAGES[ZONE_NORMAL]", None, 1),
        ("zone_totals", "NR_FREE_PAGES"),
    )
    for off, same in (({zone: 4}, [total]), ({zone: 4, total: -4}, [])):
        assert said(off, same) == [
            ("a CPU's changes", 1, 4, {zone: 4}),
            ("the value of the zone", 1, 4, {zone: 4, total: -4}),
        ]
    assert said({total: -4, zone: 4}) == [
        ("the total of all zones", None, -4, {total: -4}),
        ("the value of the zone", 1, 4, {total: -4, zone: 4}),
    ]
    # No other row may compare the counter of the zone.
    for others in ({}, {("zone_free", "NR_FREE_CMA_PAGES[ZONE_NORMAL]", None, 1): 4}):
        assert said({total: -4, **others}) == [
            ("the total of all zones", None, -4, {total: -4}),
            ("the value of a zone", None, 4, {total: -4}),
        ]


def test_pages_that_lost_their_type_are_of_one_zone() -> None:
    blocks = ("zone_free_area", "free_area[ZONE_NORMAL][2]", None, 1)
    own, of_another, of_node = (
        ("zone_free", f"NR_FREE_PAGES[{zone}]", None, nid)
        for zone, nid in (("ZONE_NORMAL", 1), ("ZONE_DMA", 1), ("ZONE_NORMAL", 0))
    )
    alone = ("the number of blocks on the list", 1, 4, {blocks: 4})
    assert said({blocks: 4, own: 4}) == [alone, ("the type of pages", 1, 4, {blocks: 4, own: 4})]
    assert said({blocks: 4, of_another: 4, of_node: 4}) == [alone]
