# SPDX-License-Identifier: LGPL-2.1-or-later
"""Several counters that are wrong at once: a range that was overwritten, or a flush."""

from __future__ import annotations

from dataclasses import replace

from support.made_kernel import LRUVEC, MAIL, PAGE, SHOP, WEB, Kernel, busy

from memcg_inspect.checks.diagnosis import diagnose
from memcg_inspect.checks.judge import judge
from memcg_inspect.model_counters import CounterWord
from memcg_inspect.report import Diagnosis, Evidence

#: Neighbours in the arrays.
ITEMS = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B", "NR_KERNEL_STACK_KB", "NR_PAGETABLE")


def diagnoses(kernel: Kernel, *words: CounterWord) -> tuple[Diagnosis, ...]:
    made = kernel.snapshot()
    judged = judge(made)
    findings = [pending.finding for pending in judged.findings]
    return diagnose(made, judged.rows, findings, words)


def folded(apart: int = 8) -> list[CounterWord]:
    """Return the words of the folded counters of a memcg on node 0."""
    return [
        CounterWord("state", item, 0x8000 + apart * n, 8, WEB, 0) for n, item in enumerate(LRUVEC)
    ]


def overwrite(kernel: Kernel, number: int) -> Kernel:
    for n, item in enumerate(ITEMS[:number]):
        kernel.state[WEB, item, 0] += 40_000 + 4 * n
    return kernel


def test_neighbouring_words_are_one_cause() -> None:
    for seed in range(4):
        [found] = diagnoses(overwrite(busy(seed), 4), *folded())
        assert (found.cause, found.confidence) == ("overwritten", "likely")
        assert (found.memcgs, found.nid, found.amount) == ((WEB,), 0, 32)
        assert [e.address for e in found.evidence] == [0x8000]
        assert found.evidence_total == 1
        assert "up to 0x8020: NR_SLAB_RECLAIMABLE_B to NR_PAGETABLE" in str(found.evidence[0].note)


def test_words_far_from_each_other_are_several_causes() -> None:
    found = diagnoses(overwrite(busy(1), 4), *folded(apart=64))
    assert [d.cause for d in found] == ["counter"] * 4


def test_two_words_are_no_range() -> None:
    found = diagnoses(overwrite(busy(1), 2), *folded())
    assert [d.cause for d in found] == ["counter"] * 2
    # Each shows its word.
    assert {(e.address, d.evidence_total) for d in found for e in d.evidence} == {
        (0x8000, 1),
        (0x8008, 1),
    }


def test_without_words_nothing_is_overwritten() -> None:
    assert [d.cause for d in diagnoses(overwrite(busy(1), 4))] == ["counter"] * 4


def test_the_cpu_is_the_one_that_has_the_changes() -> None:
    kernel = busy(1)
    for item in ITEMS:
        kernel.cpu[WEB, item, 0] += 40_000
    words = [
        CounterWord("percpu", item, at + 8 * n, 8, WEB, 0, cpu, pending)
        for cpu, at, pending in ((0, 0x8000, 300), (1, 0x9000, 39_960), (2, 0xA000, -400))
        for n, item in enumerate(LRUVEC)
    ]
    handed_up = [
        CounterWord("state_pending", item, 0x7000 + 8 * n, 8, WEB, 0, pending=300)
        for n, item in enumerate(LRUVEC)
    ]
    [found] = diagnoses(kernel, *handed_up, *words)
    assert found.cause == "overwritten"
    assert "CPU 1" in found.what
    assert [e.address for e in found.evidence] == [0x9000]


def test_changes_that_no_flush_knows_of_follow_from_what_was_overwritten() -> None:
    """There is no more of them than there are counters."""
    kernel = busy(1)
    for item in ITEMS:
        kernel.cpu[WEB, item, 0] += 40_000
    words = [
        CounterWord("percpu", item, 0x8000 + 8 * n, 8, WEB, 0, 0, 40_000)
        for n, item in enumerate(ITEMS)
    ]
    made = kernel.snapshot()
    judged = judge(made)
    findings = [pending.finding for pending in judged.findings]
    for number, memcg, follows in (
        (1, WEB, True),
        (4, WEB, True),
        (5, WEB, False),
        (1, MAIL, False),
    ):
        unfolded = replace(
            findings[0],
            identity="updated",
            kind="never-folded",
            memcg=memcg,
            nid=None,
            difference=number,
            what="made",
            evidence_is="proof",
            evidence=(Evidence(address=0x7000, kind="memcg"),),
        )
        found = diagnose(made, judged.rows, [*findings, unfolded], words)
        causes = ["overwritten"] if follows else ["overwritten", "never-folded"]
        assert [d.cause for d in found] == causes
        assert (len(findings) in found[0].findings) == follows


def flush(kernel: Kernel, memcg: int, local: bool) -> None:
    """Lose what a flush of a memcg folds: its own changes, or those of its children."""
    for item, size in (("MEMCG_PERCPU_B", 96), (ITEMS[0], 2400), (ITEMS[1], 5000), (LRUVEC[6], 3)):
        for nid in (None, 0) if item in LRUVEC else (None,):
            for above in (memcg, SHOP, 0x1000):
                kernel.state[above, item, nid] -= size
            if local:
                kernel.local[memcg, item, nid] -= size


def test_a_flush_is_one_cause() -> None:
    for seed in range(4):
        for local in (True, False):
            kernel = busy(seed)
            flush(kernel, WEB, local)
            [found] = diagnoses(kernel)
            assert (found.cause, found.memcgs) == ("flush", (WEB,))
            assert (found.evidence, found.evidence_total) == ((), None)
            assert found.confidence == "likely"


def test_an_item_that_no_memcg_counts_is_one_cause() -> None:
    kernel = busy(1)
    for cell in [cell for cell in kernel.state if cell[1] == "NR_PAGETABLE"]:
        kernel.state[cell] = kernel.pending[cell] = kernel.cpu[cell] = 0
        kernel.flushed[cell] = kernel.local[cell] = 0
    [found] = diagnoses(kernel)
    tables = [thing for thing in kernel.things if thing.detail == "table"]
    assert (found.cause, found.confidence) == ("uncounted-item", "only-explanation")
    assert (-(found.amount or 0), found.unit) == (sum(t.bytes for t in tables) // PAGE, "pages")
    assert "no memcg counts NR_PAGETABLE" in found.what


def test_a_counter_that_is_zero_in_two_memcgs_is_no_such_cause() -> None:
    kernel = busy(1)
    for memcg in (WEB, MAIL):
        for nid in (None, 0, 1):
            kernel.state[memcg, "NR_PAGETABLE", nid] = kernel.cpu[memcg, "NR_PAGETABLE", nid] = 0
    assert "uncounted-item" not in {found.cause for found in diagnoses(kernel)}


def test_a_flush_is_no_range() -> None:
    kernel = busy(1)
    flush(kernel, WEB, local=True)
    local = [word._replace(array="state_local", address=word.address + 0x100) for word in folded()]
    assert [d.cause for d in diagnoses(kernel, *folded(), *local)] == ["flush"]
