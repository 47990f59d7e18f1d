# SPDX-License-Identifier: LGPL-2.1-or-later
"""What several samples of a running kernel prove."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memcg_inspect.checks.findings import PendingFinding
from memcg_inspect.checks.judge import Judgement
from memcg_inspect.checks.rows import Missing, RowKey, make_row, summarize
from memcg_inspect.checks.samples import (
    SAMPLES,
    common_coverage,
    is_coming_to_rest,
    is_settled,
    settle,
    without_rows,
)
from memcg_inspect.model import Coverage
from memcg_inspect.report import Evidence, Finding, Identity, Moved, Row

WEB, DB = 0x1000, 0x2000


def row(found: int, claimed: int | None, memcg: int = WEB, missing: str | None = None) -> Row:
    return make_row(
        RowKey("slab", "BYTES", "bytes", memcg, 0),
        {"slab": found},
        None if claimed is None else {"folded": claimed},
        None if missing is None else Missing(missing, either_way=True),
    )


def pending(of: Row, *addresses: int) -> PendingFinding:
    return PendingFinding(
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
            evidence_total=len(addresses),
        ),
    )


def sample(*rows: Row, findings: tuple[PendingFinding, ...] | None = None) -> Judgement:
    """Return one sample. By default each row that differs is a finding in it."""
    if findings is None:
        findings = tuple(pending(r) for r in rows if r.status == "differs")
    return Judgement([summarize("slab", rows)], list(rows), [], list(findings), None)


def outcome(*samples: Judgement, is_whole: bool = True) -> tuple[str, str, int]:
    """Return the status of the first row, that of the identity, and the number of findings."""
    settled = settle(samples, is_whole)
    return settled.rows[0].status, settled.identities[0].status, len(settled.findings)


def test_a_row_is_exact_as_often_as_it_has_any_difference() -> None:
    """One exact sample is enough for a row that moves. It may be by chance if others are equal."""
    assert is_settled([sample(row(5, 5))])
    assert not is_settled([sample(row(5, 6))])
    others = [sample(row(n, n + off)) for n, off in enumerate((1, 1, 2, 2, -1, 3))]
    assert outcome(sample(row(5, 5)), *others) == ("moving", "moving", 0)
    assert outcome(*others, sample(row(5, 5))) == ("moving", "moving", 0)
    assert outcome(*others, *[sample(row(5, 5))] * 2) == ("exact", "exact", 0)
    assert outcome(sample(row(5, 5)), *others[1:3], others[4]) == ("exact", "exact", 0)
    assert outcome(sample(row(5, 6)), sample(row(7, 7))) == ("exact", "exact", 0)
    assert outcome(sample(row(5, 5)), sample(row(7, 9))) == ("exact", "exact", 0)


def test_the_same_difference_again_and_again_is_a_finding() -> None:
    samples = [sample(row(5, 6))] * SAMPLES
    assert not is_settled(samples[:-1])
    assert is_settled(samples)
    assert outcome(*samples) == ("differs", "findings", 1)
    assert outcome(*samples[:-1]) == ("moving", "moving", 0)


@pytest.mark.parametrize("other", [[row(7, 7, DB)], []], ids=["changes", "comes and goes"])
def test_more_samples_are_needed_beside_rows_that_change(other: list[Row]) -> None:
    """What changes may do the same in six samples of six, and be half done in each."""
    busy = [sample(row(5, 6), row(6, 6, DB)), sample(row(5, 6), *other)] * SAMPLES
    # The rows are those of the last sample.
    for samples in (busy[:-2], [*busy[:-2], busy[0]]):
        assert not is_settled(samples)
        assert outcome(*samples) == ("moving", "moving", 0)
    assert is_settled(busy[::-1])
    assert outcome(*busy[::-1]) == ("differs", "findings", 1)


def test_rows_of_another_identity_may_change() -> None:
    busy = [sample(row(5, 6), replace(row(n, n, DB), identity="percpu")) for n in range(SAMPLES)]
    assert is_settled(busy)
    assert outcome(*busy)[0] == "differs"


def test_what_was_in_flight_once_is_in_flight() -> None:
    half_done = replace(row(5, 6), status="in-flight", reason="made")
    settled = settle([sample(half_done), *[sample(row(5, 6))] * SAMPLES], True)
    assert settled.rows == [half_done]
    assert settled.findings == []


def test_each_identity_has_its_own_rows() -> None:
    other = replace(row(5, 5), identity="percpu")
    one = sample(row(5, 6), other)
    one = one._replace(
        identities=[summarize("slab", [row(5, 6)]), summarize("percpu", [other])],
    )
    settled = settle([one] * SAMPLES, True)
    assert [(i.name, i.status) for i in settled.identities] == [
        ("slab", "findings"),
        ("percpu", "exact"),
    ]


def test_the_result_is_that_of_the_last_sample() -> None:
    first, last = sample(row(5, 5)), sample(row(5, 5), row(7, 7, DB))
    last = last._replace(identities=[*last.identities, Identity("zswap", "not-kept", 0, 0)])
    settled = settle([first, first, last], True)
    assert [identity.name for identity in settled.identities] == ["slab", "zswap"]
    assert [r.memcg for r in settled.rows] == [WEB, DB]


def test_what_the_program_itself_changes_proves_nothing() -> None:
    samples = [sample(row(5, 6), row(5, 6, DB))] * SAMPLES
    settled = settle(samples, True, [WEB, DB])
    assert [r.status for r in settled.rows] == ["moving", "differs"]
    assert settled.rows[0].reason == (
        "this program runs in this memcg, or below it, and changes it while it reads"
    )
    assert [found.finding.memcg for found in settled.findings] == [DB]
    # what is about a subtree concerns its ancestors, too
    whole = [sample(replace(row(5, 6, DB), identity="hierarchy"))] * SAMPLES
    assert settle(whole, True, [WEB, DB]).rows[0].status == "moving"
    assert settle(whole, True, [WEB]).rows[0].status == "differs"


@pytest.mark.parametrize(
    ("identity", "status"), [("node_slab", "moving"), ("node_vmalloc", "differs")]
)
def test_memory_of_nodes_that_this_program_may_have_allocated(identity: str, status: str) -> None:
    """Only on the machine that it runs on, and it makes no vmalloc areas."""
    off = replace(row(5, 9), identity=identity, memcg=None)
    samples = [sample(off)] * SAMPLES
    own = settle(samples, True, [WEB]).rows[0]
    assert own.status == status
    reason = "this program runs on this machine, and changes the node while it reads"
    assert own.reason == (reason if status == "moving" else None)
    assert settle(samples, True).rows[0].status == "differs"


def test_what_moves_is_no_finding() -> None:
    """The same difference between other amounts may be another operation that is half done."""
    samples = [sample(row(n, n + 1)) for n in range(SAMPLES)]
    assert is_settled(samples[:2])
    assert outcome(*samples) == ("moving", "moving", 0)
    # The amounts are those of the last sample, which is the newest.
    [last] = settle(samples, True).rows
    assert (last.found, last.claimed) == ({"slab": SAMPLES - 1}, {"folded": SAMPLES})


def test_what_moved_at_first_is_a_finding_after_twice_as_many_samples() -> None:
    moved, same = sample(row(1, 9)), [sample(row(5, 6))] * (2 * SAMPLES)
    assert outcome(moved, *same[1:]) == ("moving", "moving", 0)
    assert outcome(moved, *same) == ("differs", "findings", 1)
    (finding,) = settle([moved, *same], True).findings
    assert finding.finding.difference == 1
    # The memcg was created after the first sample.
    assert outcome(sample(row(5, 5, DB)), *same) == ("differs", "findings", 1)
    # Being exact once is no proof against that, and neither for it.
    assert outcome(sample(row(5, 5)), *same) == ("differs", "findings", 1)
    assert outcome(sample(row(5, 5)), *same[1:]) == ("moving", "moving", 0)


def test_what_was_before_a_gap_does_not_count() -> None:
    """Another memcg, or obj_cgroup, may have been made at the address."""
    gap, same = sample(row(1, 1, DB)), [sample(row(9, 17))] * (2 * SAMPLES)
    assert outcome(*[sample(row(5, 5))] * 20, gap, *same) == ("differs", "findings", 1)
    assert outcome(*[sample(row(5, 5))] * 20, gap, *same[1:]) == ("moving", "moving", 0)
    assert outcome(*same, gap, sample(row(5, 5))) == ("exact", "exact", 0)
    moved = settle([sample(row(1, 9)), gap, sample(row(5, 6)), sample(row(7, 9))], True).rows[0]
    assert moved.moved == Moved(looks=2, found=2, claimed=3, least=1, most=2)


@pytest.mark.parametrize(("off", "is_proved"), [(64 * 44, False), (64 * 44 + 1, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_difference_that_is_far_larger_than_the_changes(
    off: int, is_proved: bool, sign: int
) -> None:
    """Both sides change by 22 in twelve samples."""
    samples = [sample(row(9000 + 2 * n, 9000 + 2 * n + sign * off)) for n in range(2 * SAMPLES)]
    expected = ("differs", "findings", 1) if is_proved else ("moving", "moving", 0)
    assert outcome(*samples) == expected
    assert outcome(*samples[1:]) == ("moving", "moving", 0)
    # The result is the newest row.
    assert settle(samples, True).rows[0].found == {"slab": 9022}
    # Neither if it was on the other side, nor if it was exact meanwhile.
    for other in (row(9000, 9000 - sign * off), row(9000, 9000)):
        assert outcome(*samples[:6], sample(other), *samples[6:]) == ("moving", "moving", 0)
    assert outcome(sample(row(9000, 9000)), *samples) == expected


def without_stacks(judged: Judgement) -> Judgement:
    return judged._replace(is_decisive=False)


def test_two_samples_have_the_stacks_of_tasks() -> None:
    """A task may leave the middle of a charge before its stack is read, not often."""
    off, early = sample(row(5, 6)), without_stacks(sample(row(5, 6)))
    assert not is_settled([early] * SAMPLES)
    assert not is_settled([early] * (SAMPLES - 1) + [off])
    assert outcome(*[early] * (SAMPLES - 1), off) == ("moving", "moving", 0)
    assert is_settled([early] * (SAMPLES - 2) + [off] * 2)
    assert outcome(*[early] * (SAMPLES - 2), *[off] * 2) == ("differs", "findings", 1)
    assert outcome(*[early] * (2 * SAMPLES), off)[0] == "moving"


@pytest.mark.parametrize(("explained", "status"), [(2, "differs"), (3, "unverifiable")])
def test_a_task_that_may_account_for_the_difference(explained: int, status: str) -> None:
    """It did so more often than not."""
    off, early = sample(row(5, 6)), without_stacks(sample(row(5, 6)))
    maybe = sample(replace(row(5, 6), status="unverifiable", reason="may be half done"))
    samples = [*[early] * 4, off, off, *[maybe] * explained]
    assert is_settled(samples) == (status == "differs")
    assert outcome(*samples)[0] == status
    # Without the stacks, they tell nothing.
    before = [without_stacks(maybe)] * 5
    assert outcome(*before, *[early] * 4, off, off)[0] == "differs"


def test_a_machine_comes_to_rest() -> None:
    """Half of the rows that moved are settled by three samples, or all stand still."""
    busy = [sample(*(row(n, n + 1 + n % 2, memcg) for memcg in range(8))) for n in range(6)]
    assert is_coming_to_rest(busy[:3])
    assert not is_coming_to_rest(busy[:4])
    assert not is_coming_to_rest(busy)
    fewer = [
        sample(*(row(9, 9 + (memcg > 4) * (n % 2 + 1), memcg) for memcg in range(8)))
        for n in range(3)
    ]
    assert is_coming_to_rest([*busy, *fewer])
    assert not is_coming_to_rest([*busy, *fewer, *fewer])
    # Rows of the program's own memcg never come to rest.
    assert not is_coming_to_rest([sample(row(5, 6))], [WEB])
    still = [sample(*(row(5, 6, memcg) for memcg in range(8)))] * (2 * SAMPLES)
    assert not is_coming_to_rest([*busy, *still[:3]])
    assert is_coming_to_rest([*busy, *still[:4]])
    assert is_coming_to_rest([*busy, *still[:-1]])
    assert not is_coming_to_rest([*busy, *still])  # proved
    # One of them stands still, or differs by far more than it moves.
    for one in (row(5, 6), row(10_000, 20_000)):
        rows = [[row(n, n + 1 + n % 2, memcg) for memcg in range(1, 8)] for n in range(7)]
        far = [sample(replace(one, memcg=0), *some) for some in rows]
        assert is_coming_to_rest([*busy, *far[:4]])
        assert not is_coming_to_rest([*busy, *far[:3]])
    larger = [sample(*(row(n, n + 5000, memcg) for memcg in range(8))) for n in range(10)]
    assert is_coming_to_rest([*busy, *larger[:4]])
    assert not is_coming_to_rest([*busy, *larger[:3]])
    assert not is_coming_to_rest([sample(row(5, 5))])
    # Few rows move.
    few = [sample(row(n, n + 1 + n % 2), *[row(5, 5, 2)] * 19) for n in range(6)]
    assert is_coming_to_rest(few)
    assert not is_coming_to_rest([one._replace(rows=one.rows[:-1]) for one in few])


@pytest.mark.parametrize(("number", "rests"), [(3, True), (4, True), (5, False)])
def test_the_last_samples_settled_half_of_the_rows(number: int, rests: bool) -> None:
    busy = [sample(*(row(n, n + 1 + n % 2, memcg) for memcg in range(8))) for n in range(6)]
    fewer = [
        sample(*(row(9, 9 + (memcg < number) * (n % 2 + 1), memcg) for memcg in range(8)))
        for n in range(3)
    ]
    assert is_coming_to_rest([*busy, *fewer]) == rests


def test_few_rows_are_few_of_those_of_the_last_sample() -> None:
    few = [sample(row(n, n + 1 + n % 2), *[row(5, 5, 2)] * 19) for n in range(6)]
    shorter = few[5]._replace(rows=few[5].rows[:-1])
    assert is_coming_to_rest([few[0], few[1]._replace(rows=few[1].rows[:-1]), *few[2:]])
    assert not is_coming_to_rest([*few[:5], shorter])


def test_an_identity_that_is_not_kept_stays_so() -> None:
    none = Identity("zswap", "not-kept", 0, 0, "this kernel has no zswap")
    some = [one._replace(identities=[*one.identities, none]) for one in [sample(row(5, 5))] * 2]
    assert settle(some, True).identities[1] == none


def test_counters_that_no_sample_could_read_did_not_move() -> None:
    unread = [sample(row(n, None)) for n in (5, 7)]
    [one] = settle(unread, False).rows
    assert (one.status, one.reason) == ("unverifiable", "the counter could not be read")
    moving = [sample(row(5, 6)), sample(row(9, None)), sample(row(7, 11))]
    assert settle(moving, True).rows[0].moved == Moved(3, 4, 5, 1, 4)


def test_folding_moves_nothing() -> None:
    folded = replace(row(5, 6), claimed={"folded": 2, "pending_cpu": 4})
    samples = [sample(row(5, 6)), sample(folded)] * (SAMPLES // 2)
    assert outcome(*samples) == ("differs", "findings", 1)
    # The row is as it was in the last sample that could verify it.
    assert settle(samples, True).rows[0].claimed == folded.claimed
    last = replace(row(5, 6), claimed={"folded": 1, "pending_cpu": 5})
    unknown = sample(row(5, None, missing="gone"))
    assert settle([*samples, sample(last), unknown], True).rows[0].claimed == last.claimed


def test_a_sample_that_cannot_tell_is_made_good_by_another() -> None:
    off, unknown = sample(row(5, 6)), sample(row(5, None, missing="gone"))
    samples = [off, unknown, off, off, off, off]
    assert not is_settled(samples)
    assert outcome(*samples) == ("moving", "moving", 0)
    for enough in ([*samples, off], [*samples, off, unknown]):
        assert is_settled(enough)
        assert outcome(*enough) == ("differs", "findings", 1)
    # no more samples are taken in the end
    assert is_settled([off, unknown] * SAMPLES)
    assert not is_settled([off, *[unknown] * SAMPLES])
    assert not is_settled([off, *[unknown] * (3 * SAMPLES - 2)])
    assert is_settled([off, *[unknown] * (3 * SAMPLES - 1)])
    # as many exact samples settle it
    assert outcome(*samples, *[sample(row(6, 6))] * 4)[0] == "moving"
    assert outcome(*samples, *[sample(row(6, 6))] * 5)[0] == "exact"


def test_draining_a_stock_moves_nothing() -> None:
    """A busy machine often drains stocks, including those of idle memcgs."""
    shares = [(0, 700), (700, 0), (300, 400), (0, 700), (100, 600), (0, 700)]
    samples = [
        sample(replace(row(100, 900), found={"slab": 100, "stock": s, "nr_charged_bytes": n}))
        for s, n in shares
    ]
    assert outcome(*samples) == ("differs", "findings", 1)
    other = replace(row(100, 900), found={"slab": 101, "stock": 0, "nr_charged_bytes": 699})
    assert outcome(*samples[:-1], sample(other))[0] == "moving"


def test_another_difference_each_time_is_none() -> None:
    samples = [sample(row(5, 6)), sample(row(5, 7))]
    assert is_settled(samples)
    settled = settle(samples, True)
    assert settled.rows[0].status == "moving"
    assert settled.rows[0].reason == "changed between 2 samples"
    assert settled.rows[0].moved == Moved(looks=2, found=0, claimed=1, least=1, most=2)
    assert settled.findings == []


def test_rows_that_stand_still_are_told_from_those_that_do_not() -> None:
    samples = [sample(row(5, 6), row(n, 2 * n, DB)) for n in range(1, 2 * SAMPLES + 1)]
    settled = settle(samples, True)
    assert [r.status for r in settled.rows] == ["differs", "moving"]
    assert [found.finding.memcg for found in settled.findings] == [WEB]
    assert settled.identities[0].status == "findings"


def test_memcgs_that_went_are_not_judged_and_new_ones_are() -> None:
    settled = settle([sample(row(5, 6), row(1, 1, DB)), sample(row(9, 9, 0x3000))], True)
    assert [(r.memcg, r.status) for r in settled.rows] == [(0x3000, "exact")]
    samples = [sample(), sample(row(5, 6)), sample(row(5, 6))]
    assert outcome(*samples) == ("moving", "moving", 0)


def test_unreadable_in_every_sample() -> None:
    hidden = sample(row(5, 6, missing="not there"))
    assert outcome(hidden, hidden, is_whole=False) == ("unverifiable", "unverifiable", 0)
    # what could not be read was something else each time
    assert outcome(hidden, hidden) == ("moving", "moving", 0)
    assert settle([hidden, hidden], True).rows[0].reason == (
        "something else could not be read in 2 of 2 samples"
    )
    assert settle([sample(), hidden], True).rows[0].reason == (
        "something else could not be read in 1 of 2 samples"
    )
    assert outcome(hidden, sample(row(5, 5)), is_whole=False)[0] == "exact"


def test_a_difference_that_the_last_sample_could_not_verify_is_unverifiable() -> None:
    off, unknown = sample(row(5, 6)), sample(row(5, None, missing="gone"))
    settled = settle([off, unknown], True)
    assert settled.rows == unknown.rows
    assert settled.identities[0].status == "unverifiable"
    # It moved before.
    assert settle([sample(row(5, 7)), off, unknown], True).rows[0].reason == (
        "changed between 3 samples"
    )


@pytest.mark.parametrize(
    ("seen", "left"),
    [
        (((1, 2), (2, 3), (2,)), (2,)),
        (((1, 2), (2,)), (2,)),
        (((1,), (2,), (3,)), None),
        (((1,), (), (1,)), None),
    ],
)
def test_a_proof_must_be_the_same_one(
    seen: tuple[tuple[int, ...], ...], left: tuple[int, ...] | None
) -> None:
    """For a finding without a row: an orphan pointer."""
    same = row(5, 5)
    samples = [
        sample(same, findings=(pending(row(1, 2, DB), *addresses),))
        for addresses in seen
        if addresses
    ]
    samples += [sample(same, findings=()) for addresses in seen if not addresses]
    settled = [made.finding for made in settle(samples, True).findings]
    found = [tuple(e.address for e in finding.evidence) for finding in settled]
    assert found == ([] if left is None else [left])
    # How many of those that are not listed are in all samples is not known.
    assert all(finding.evidence_total is None for finding in settled)


@pytest.mark.parametrize(
    ("seen", "left"), [(((1, 2), (2, 3)), (2,)), (((1, 2), (3,)), None), (((), ()), ())]
)
def test_evidence_of_a_row_that_differs_must_be_the_same(
    seen: tuple[tuple[int, ...], ...], left: tuple[int, ...] | None
) -> None:
    """None at all is the same, too: what is wrong may be the counter."""
    off = row(5, 6)
    samples = [sample(off, findings=(pending(off, *addresses),)) for addresses in seen] * SAMPLES
    found = settle(samples, True).findings
    evidence = [tuple(e.address for e in one.finding.evidence) for one in found]
    assert evidence == ([] if left is None else [left])
    # Without a finding, nothing is wrong in particular, and nothing is exact.
    expected = ("moving", "moving", 0) if left is None else ("differs", "findings", 1)
    assert outcome(*samples) == expected
    # Without a row, only evidence proves a finding.
    alone = [sample(row(5, 5), findings=(pending(row(1, 2, DB)),))] * SAMPLES
    assert settle(alone, True).findings == []


def test_objects_that_only_may_explain_a_row_can_be_others_each_time() -> None:
    """The amounts of the row prove it."""
    off = row(5, 6)
    made = [replace(pending(off, n).finding, evidence_is="candidates") for n in range(1, 7)]
    samples = [sample(off, findings=(PendingFinding(one),)) for one in made]
    assert outcome(*samples) == ("differs", "findings", 1)
    (found,) = settle(samples, True).findings
    assert (found.finding.evidence, found.finding.evidence_total) == ((), None)


def test_what_is_found_of_a_row_may_change_with_other_rows() -> None:
    """The newest sample says what it is, with what other samples know of it, too."""
    off = row(5, 6)
    made = [replace(pending(off, 7).finding, kind=kind) for kind in ("rule", "of rows") * 3]
    samples = [sample(off, findings=(PendingFinding(one),)) for one in made]
    assert outcome(*samples) == ("differs", "findings", 1)
    (found,) = settle(samples, True).findings
    assert (found.finding.kind, [e.address for e in found.finding.evidence]) == ("of rows", [7])
    # A row that follows from another one has no finding, if that one has.
    samples = [sample(off, row(8, 9, DB), findings=(pending(off),))] * SAMPLES
    assert [one.status for one in settle(samples, True).rows] == ["differs", "differs"]
    samples = [sample(off, row(8, 9, DB), findings=())] * SAMPLES
    assert [one.status for one in settle(samples, True).rows] == ["moving", "moving"]
    # The newest sample has none.
    samples = [*[sample(off)] * SAMPLES, sample(off, findings=())]
    assert outcome(*samples) == ("moving", "moving", 0)


@pytest.mark.parametrize("changed", ["nid", "objcg"])
def test_a_proof_that_is_part_of_what_it_was(changed: str) -> None:
    """An object of another node was freed, or others are charged to such an address, too."""
    whole = pending(replace(row(1, 2, DB), memcg=None, nid=None), 7, 8).finding
    part = replace(pending(replace(row(1, 2, DB), memcg=None, nid=None), 7).finding, **{changed: 1})
    samples = [sample(row(5, 5), findings=(PendingFinding(one),)) for one in (whole, part) * 3]
    (found,) = settle(samples, True).findings
    assert found.finding == replace(part, evidence_total=None)
    other = PendingFinding(replace(part, item="another"))
    assert settle([*samples, sample(row(5, 5), findings=(other,))], True).findings == []


def test_the_evidence_of_a_single_sample_is_all_there_is() -> None:
    one = sample(row(5, 5), findings=(pending(row(1, 2, DB), 7, 8),))
    for samples, total in (([one], 2), ([one, one], None)):
        [found] = settle(samples, True).findings
        assert ([e.address for e in found.finding.evidence], found.finding.evidence_total) == (
            [7, 8],
            total,
        )


def test_a_proof_without_a_row_needs_enough_samples() -> None:
    one = sample(row(5, 5), findings=(pending(row(1, 2, DB), 7),))
    assert not is_settled([one] * (SAMPLES - 1))
    assert is_settled([one] * SAMPLES)
    # One sample without it is enough.
    assert is_settled([one, sample(row(5, 5), findings=())])


def test_findings_without_a_row() -> None:
    of_row, alone = pending(row(5, 6)), pending(row(1, 2, DB), 7)
    assert without_rows(sample(row(5, 6), findings=(of_row, alone))) == [alone]


def coverage(*addresses: int, more: int = 0) -> Coverage:
    made = Coverage(read=10)
    for address in addresses:
        made.miss("task", address, "gone")
    made.unreadable += more
    return made


def test_what_only_some_samples_missed_was_there() -> None:
    assert common_coverage([coverage(1, 2), coverage()]).unreadable == 0
    assert common_coverage([coverage(1, 2), coverage(3)]).unreadable == 0
    both = common_coverage([coverage(1, 2), coverage(2, 3), coverage(2)])
    assert (both.unreadable, [e.address for e in both.examples]) == (1, [2])
    # more than the examples that are kept: they may differ
    assert common_coverage([coverage(1, more=5), coverage(2, more=9)]).unreadable == 6
