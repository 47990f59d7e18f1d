# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which of the three places that have a charge of a huge page is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made_hugetlb import CHARGED, HUGE, A, B, alone, made
from support.made_rows import Short, options, shown

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot

USAGE: Short = ("hugetlb_usage", "hugetlb.2MB.usage[/a]")
OTHER: Short = ("hugetlb_usage", "hugetlb.2MB.usage[/a/b]")
ON_NODE: Short = ("hugetlb_nodes", "hugetlb.2MB.numa_stat[/a]", None)
OTHER_ON_NODE: Short = ("hugetlb_nodes", "hugetlb.2MB.numa_stat[/a/b]", None)
MOVED = {**CHARGED, (A, 9, 0): HUGE, (B, 9, 0): 2 * HUGE}


def only(taken: Snapshot) -> tuple[str, int | None, int | None, str]:
    """Return cause, node, amount and words of the only diagnosis."""
    judged = judge(taken)
    findings = [pending.finding for pending in judged.findings]
    [found] = diagnose(taken, judged.rows, findings, ())
    return found.cause, found.nid, found.amount, found.what


def test_cgroups_at_rest() -> None:
    judged = judge(made())
    assert not judged.findings
    assert {row.status for row in judged.rows if row.identity.startswith("hugetlb")} == {"exact"}


@pytest.mark.parametrize(("pages", "side"), [(HUGE, "high"), (-HUGE, "low"), (3, "high")])
def test_one_page_counter(pages: int, side: str) -> None:
    cause, nid, amount, what = only(alone(made(), B, 0, pages))
    assert (cause, nid, amount) == ("hugetlb-charge", None, pages)
    assert what.startswith("hugetlb.2MB.usage[/a/b] is ")
    assert what.endswith(f" too {side}, in this page counter only")


@pytest.mark.parametrize("pages", [HUGE, -HUGE])
def test_page_counters_up_to_the_root(pages: int) -> None:
    cause, nid, amount, what = only(made(own={(B, 0): pages}))
    assert (cause, nid, amount) == ("hugetlb-charge", None, pages)
    assert what.endswith("in all page counters from this one up")


def test_the_usage_of_a_node() -> None:
    found = only(made(on_nodes={(B, 0, 1): -HUGE}))
    what = "hugetlb.2MB.numa_stat[/a/b] of node 1 is 512 pages too low"
    assert found == ("hugetlb-charge", 1, -HUGE, what)


def test_a_page_that_was_uncharged_from_neither() -> None:
    cause, nid, amount, what = only(made({(B, 0): HUGE}, {(B, 0, 1): HUGE}))
    assert (cause, nid, amount) == ("hugetlb-charge", 1, HUGE)
    assert what.endswith("in both counters")


def test_a_page_that_is_counted_on_another_node() -> None:
    """As by kernels that do not move the usage with a page that migrates."""
    cause, nid, amount, what = only(made(on_nodes={(B, 0, 0): HUGE, (B, 0, 1): -HUGE}))
    assert (cause, nid, amount) == ("hugetlb-charge", 0, HUGE)
    counted = "512 pages of hugetlb.2MB.numa_stat[/a/b] are counted on node 0 instead of on node 1"
    assert what == counted
    *_, amount, what = only(made(on_nodes={(B, 0, 0): 1, (B, 0, 1): -1}))
    assert amount == 1
    assert what.endswith("node 0 instead of on node 1")


def test_pages_of_two_sizes_are_two_causes() -> None:
    taken = made({(B, 0): HUGE, (A, 1): -HUGE}, moves_usage=False)
    judged = judge(taken)
    found = diagnose(taken, judged.rows, [pending.finding for pending in judged.findings], ())
    assert {(d.cause, d.amount) for d in found} == {
        ("hugetlb-charge", HUGE),
        ("hugetlb-charge", -HUGE),
    }


def test_a_page_that_refers_to_another_cgroup() -> None:
    cause, nid, amount, what = only(made(charged=MOVED))
    assert (cause, nid, amount) == ("hugetlb-owner", 0, HUGE)
    assert what == (
        "512 pages of huge pages of node 0 that were charged to hugetlb.2MB.usage[/a] refer to the"
        " cgroup of hugetlb.2MB.usage[/a/b]"
    )


def test_a_page_of_another_cgroup_where_nodes_are_not_compared() -> None:
    what = (
        "512 pages of huge pages that were charged to hugetlb.2MB.usage[/a] refer to the cgroup of"
        " hugetlb.2MB.usage[/a/b]"
    )
    found = only(made(charged=MOVED, moves_usage=False))
    assert found == ("hugetlb-owner", None, HUGE, what)


def test_a_path_that_looks_like_a_counter() -> None:
    taken = made(charged=MOVED)
    cgroups = taken.hugetlb.cgroups
    hostile = {**cgroups, A: cgroups[A]._replace(path="/a.usage[b")}
    cause, nid, amount, what = only(replace(taken, hugetlb=replace(taken.hugetlb, cgroups=hostile)))
    assert (cause, nid, amount) == ("hugetlb-owner", 0, HUGE)
    assert "hugetlb.2MB.usage[/a.usage[b]" in what


def test_what_is_no_cgroup() -> None:
    charged = {**CHARGED, (0xBAD, 9, 0): HUGE}
    del charged[B, 9, 0]
    cause, nid, amount, what = only(made(charged=charged))
    assert (cause, nid, amount) == ("hugetlb-owner", 0, HUGE)
    assert what.endswith("refer to the cgroup of hugetlb.2MB.usage[0xbad]")


def test_the_two_sides_of_a_charge_are_off_by_as_much() -> None:
    """Not a cgroup, a size, or a node that is off by another amount, or in the same direction."""
    off: dict[Short, int] = {
        USAGE: HUGE,
        OTHER: -HUGE,
        ("hugetlb_usage", "hugetlb.2MB.usage[/]"): -300,
        ("hugetlb_usage", "hugetlb.2MB.usage[0x400]"): HUGE,
        ("hugetlb_usage", "hugetlb.1GB.usage[/a/b]"): -HUGE,
        (*ON_NODE, 0): 7,
        (*ON_NODE, 1): HUGE,
        (*OTHER_ON_NODE, 0): HUGE,
        (*OTHER_ON_NODE, 1): -HUGE,
    }
    above: Short = ("hugetlb_usage", "hugetlb.2MB.usage[/]")
    found = [(h.cause, h.nid, h.place, shown(h.signature)) for h in options(made(), off)]
    assert found == [
        (
            *("hugetlb-owner", 1, OTHER[1]),
            {USAGE: HUGE, OTHER: -HUGE, (*ON_NODE, 1): HUGE, (*OTHER_ON_NODE, 1): -HUGE},
        ),
        ("hugetlb-charge", None, "in this page counter only", {USAGE: HUGE, above: -HUGE}),
        ("hugetlb-charge", None, "in all page counters from this one up", {USAGE: HUGE}),
        ("hugetlb-charge", 1, "in both counters", {USAGE: HUGE, (*ON_NODE, 1): HUGE}),
    ]


def test_a_page_on_another_node_stays_in_its_cgroup() -> None:
    off: dict[Short, int] = {(*ON_NODE, 0): HUGE, (*OTHER_ON_NODE, 1): -HUGE, (*ON_NODE, 1): -HUGE}
    found = [(h.nid, h.place, shown(h.signature)) for h in options(made(), off)]
    assert found == [
        (0, "", {(*ON_NODE, 0): HUGE}),
        (0, "instead of on node 1", {(*ON_NODE, 0): HUGE, (*ON_NODE, 1): -HUGE}),
    ]


def test_no_more_than_eight_cgroups_are_tried_as_the_other_side() -> None:
    others = [("hugetlb_usage", f"hugetlb.2MB.usage[/{n}]") for n in range(9)]
    some = options(made(moves_usage=False), {USAGE: HUGE, **dict.fromkeys(others, -HUGE)})
    assert [h.place for h in some if h.cause == "hugetlb-owner"] == [name for _, name in others[:8]]
