# SPDX-License-Identifier: LGPL-2.1-or-later
"""What several looks at a running kernel prove, and what they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memcg_inspect.checks.findings import Lead
from memcg_inspect.checks.judge import Judgement
from memcg_inspect.checks.looks import LOOKS, common_coverage, is_settled, settle
from memcg_inspect.checks.rows import make_row, summarize
from memcg_inspect.model import Coverage, Evidence, Finding, Moved, Row

WEB, DB = 0x1000, 0x2000


def row(found: int, claimed: int | None, memcg: int = WEB, missing: str | None = None) -> Row:
    return make_row(
        "slab",
        memcg=memcg,
        nid=0,
        item="BYTES",
        unit="bytes",
        found={"slab": found},
        claimed=None if claimed is None else {"folded": claimed},
        missing=missing,
        missing_hides_both=missing is not None,
    )


def lead(of: Row, *addresses: int) -> Lead:
    return Lead(
        Finding(
            identity=of.identity,
            kind="counter-above-objects",
            memcg=of.memcg,
            objcg=None,
            nid=of.nid,
            item=of.item,
            unit=of.unit,
            difference=of.difference,
            what="off",
            evidence_is="proof" if addresses else "candidates",
            evidence=tuple(Evidence(address, "slab") for address in addresses),
        ),
        None,
    )


def look(*rows: Row, leads: tuple[Lead, ...] | None = None) -> Judgement:
    """One look; what differs is a finding in it, unless told otherwise."""
    if leads is None:
        leads = tuple(lead(r) for r in rows if r.status == "differs")
    return Judgement([summarize("slab", rows)], list(rows), [], list(leads), None)


def outcome(*looks: Judgement, is_whole: bool = True) -> tuple[str, str, int]:
    """Status of the first row, of the identity, and the number of findings."""
    settled = settle(looks, is_whole)
    return settled.rows[0].status, settled.identities[0].status, len(settled.leads)


def test_one_exact_look_is_enough() -> None:
    assert is_settled([look(row(5, 5))])
    assert not is_settled([look(row(5, 6))])
    assert outcome(look(row(5, 6)), look(row(7, 7))) == ("exact", "exact", 0)
    assert outcome(look(row(5, 5)), look(row(7, 9))) == ("exact", "exact", 0)


def test_the_same_difference_again_and_again_is_a_finding() -> None:
    looks = [look(row(5, 6))] * LOOKS
    assert not is_settled(looks[:-1])
    assert is_settled(looks)
    assert outcome(*looks) == ("differs", "findings", 1)
    assert outcome(*looks[:-1]) == ("moving", "moving", 0)


def test_what_the_program_itself_changes_proves_nothing() -> None:
    looks = [look(row(5, 6), row(5, 6, DB))] * LOOKS
    settled = settle(looks, True, [WEB, DB])
    assert [r.status for r in settled.rows] == ["moving", "differs"]
    assert [found.finding.memcg for found in settled.leads] == [DB]
    # what is about a subtree concerns its ancestors, too
    whole = [look(replace(row(5, 6, DB), identity="hierarchy"))] * LOOKS
    assert settle(whole, True, [WEB, DB]).rows[0].status == "moving"
    assert settle(whole, True, [WEB]).rows[0].status == "differs"


def test_what_moves_is_no_finding() -> None:
    """The same difference of other amounts: as likely the same thing half done again."""
    looks = [look(row(n, n + 1)) for n in range(LOOKS)]
    assert is_settled(looks[:2])
    assert outcome(*looks) == ("moving", "moving", 0)


def test_folding_moves_nothing() -> None:
    folded = make_row(
        "slab", memcg=WEB, nid=0, item="BYTES", unit="bytes",
        found={"slab": 5}, claimed={"folded": 2, "pending_cpu": 4},
    )  # fmt: skip
    looks = [look(row(5, 6)), look(folded)] * (LOOKS // 2)
    assert outcome(*looks) == ("differs", "findings", 1)


def test_a_look_that_cannot_tell_is_made_good_by_another() -> None:
    off, unknown = look(row(5, 6)), look(row(5, None, missing="gone"))
    looks = [off, unknown, off, off, off, off]
    assert not is_settled(looks)
    assert outcome(*looks) == ("moving", "moving", 0)
    for enough in ([*looks, off], [*looks, off, unknown]):
        assert is_settled(enough)
        assert outcome(*enough) == ("differs", "findings", 1)
    # not for ever
    assert is_settled([off, unknown] * LOOKS)
    assert not is_settled([off, *[unknown] * LOOKS])
    # one that can tell, and tells otherwise, settles it
    assert outcome(*looks, look(row(6, 6)))[0] == "exact"


def test_draining_a_stock_moves_nothing() -> None:
    """On a busy machine stocks are drained all the time, also those of memcgs that rest."""
    shares = [(0, 700), (700, 0), (300, 400), (0, 700), (100, 600), (0, 700)]
    looks = [
        look(replace(row(100, 900), found={"slab": 100, "stock": s, "nr_charged_bytes": n}))
        for s, n in shares
    ]
    assert outcome(*looks) == ("differs", "findings", 1)
    other = replace(row(100, 900), found={"slab": 101, "stock": 0, "nr_charged_bytes": 699})
    assert outcome(*looks[:-1], look(other))[0] == "moving"


def test_another_difference_each_time_is_none() -> None:
    looks = [look(row(5, 6)), look(row(5, 7))]
    assert is_settled(looks)
    settled = settle(looks, True)
    assert settled.rows[0].status == "moving"
    assert settled.rows[0].reason == "did not stand still in 2 looks"
    assert settled.rows[0].moved == Moved(looks=2, found=0, claimed=1, least=1, most=2)
    assert settled.leads == []


def test_rows_that_stand_still_are_told_from_those_that_do_not() -> None:
    looks = [look(row(5, 6), row(n, 2 * n, DB)) for n in range(1, LOOKS + 1)]
    settled = settle(looks, True)
    assert [r.status for r in settled.rows] == ["differs", "moving"]
    assert [found.finding.memcg for found in settled.leads] == [WEB]
    assert settled.identities[0].status == "findings"


def test_memcgs_that_went_are_not_judged_and_new_ones_are() -> None:
    settled = settle([look(row(5, 6), row(1, 1, DB)), look(row(9, 9, 0x3000))], True)
    assert [(r.memcg, r.status) for r in settled.rows] == [(0x3000, "exact")]
    looks = [look(), look(row(5, 6)), look(row(5, 6))]
    assert outcome(*looks) == ("moving", "moving", 0)


def test_unreadable_in_every_look() -> None:
    hidden = look(row(5, 6, missing="not there"))
    assert outcome(hidden, hidden, is_whole=False) == ("unverifiable", "unverifiable", 0)
    # what could not be read was something else each time
    assert outcome(hidden, hidden) == ("moving", "moving", 0)
    assert outcome(hidden, look(row(5, 5)), is_whole=False)[0] == "exact"


@pytest.mark.parametrize(
    ("seen", "left"),
    [(((1, 2), (2, 3), (2,)), (2,)), (((1,), (2,), (3,)), None), (((1,), (), (1,)), None)],
)
def test_a_proof_must_be_the_same_one(
    seen: tuple[tuple[int, ...], ...], left: tuple[int, ...] | None
) -> None:
    """For what no row says: a pointer that leads nowhere."""
    same = row(5, 5)
    looks = [
        look(same, leads=(lead(row(1, 2, DB), *addresses),)) for addresses in seen if addresses
    ]
    looks += [look(same, leads=()) for addresses in seen if not addresses]
    found = [tuple(e.address for e in made.finding.evidence) for made in settle(looks, True).leads]
    assert found == ([] if left is None else [left])


def coverage(*addresses: int, more: int = 0) -> Coverage:
    made = Coverage(read=10)
    for address in addresses:
        made.miss("task", address, "gone")
    made.unreadable += more
    return made


def test_what_only_some_looks_missed_was_there() -> None:
    assert common_coverage([coverage(1, 2), coverage()]).unreadable == 0
    assert common_coverage([coverage(1, 2), coverage(3)]).unreadable == 0
    both = common_coverage([coverage(1, 2), coverage(2, 3), coverage(2)])
    assert (both.unreadable, [e.address for e in both.examples]) == (1, [2])
    # more than there are examples of: nobody knows whether they are the same
    assert common_coverage([coverage(1, more=5), coverage(2, more=9)]).unreadable == 6
