# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Commands on damaged images: no traceback, no signal, no hang, and no ``exact`` over a page that
could not be read.

There are 100 runs, and as many as ``--fuzz N`` says. A seed of its own chooses the damage of each
run. A failure prints it, and the command that repeats the run.
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from fuzz.attempt import in_child
from fuzz.campaign import BATCH, KINDS, Batch, Kind, Result, batches, document, fuzz, result_of
from support.guests import DEBIAN_KERNELS, NOT_BUILT, ROOT, Lab


def params() -> list[object]:
    """Return the kinds of images; those of kernels that the lab builds only with --all."""
    return [
        pytest.param(
            kind, id=kind.name, marks=[] if kind.kernel in DEBIAN_KERNELS else [pytest.mark.long]
        )
        for kind in KINDS
        if kind.kernel not in NOT_BUILT
    ]


@pytest.mark.image
@pytest.mark.parametrize("kind", params())
def test_damaged_images(lab: Lab, kind: Kind, request: pytest.FixtureRequest) -> None:
    """With seeds that were not tried before."""
    number = -(-request.config.getoption("--fuzz") * kind.share // 100)
    batch = fuzz(kind, lab, random.SystemRandom().randrange(1 << 32), number)
    print(batch.command)
    assert [result for result in batch.results if result.bad] == []
    ended = {result.outcome for result in batch.results}
    if kind.part == "memory" and number >= 20:  # the damage was where commands read
        assert len(ended) > 1


@pytest.mark.long
@pytest.mark.image
def test_as_many_runs_as_an_hour_has_room_for() -> None:
    """Results are kept, so the part of scripts/test can be repeated until all runs are made."""
    command = [sys.executable, "scripts/fuzz", "--minutes", "45"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0


def test_what_does_not_end_is_bad() -> None:
    def attempt() -> str:
        while True:
            sum(range(1000))

    found = in_child(attempt, seconds=0.2)
    assert found["bad"] and found["outcome"].startswith("hangs in ")


def test_batches_are_of_all_kinds_in_turn() -> None:
    found = batches(20_000)
    assert 20_000 <= len(found) * BATCH < 21_000
    assert len(found) == len({(kind.name, number) for kind, number in found})
    assert [kind for kind, _ in found[: len(KINDS)]] == list(KINDS)
    assert sum(kind.share for kind in KINDS) == 100


def line(outcome: str, *damage: str, command: str = "audit --json", bad: bool = False) -> Result:
    found = {"seed": 1, "command": command, "outcome": outcome, "bad": bad}
    return result_of({**found, "damage": list(damage)})


def test_results_of_all_parts_have_the_same_words() -> None:
    assert line("refused: no memcg", "flip a:1 0x0").outcome == "refused"
    assert line("status 3", "byte at 0x1: ff", command="audit").outcome == "incomplete"
    assert line("status 0", command="audit").outcome == "exact"
    assert line("status 0", command="stock").outcome == "whole"
    assert line("exact", "flip a:1", "word b:2").damage == "several"
    assert line("KeyError: 'x'", "zero a:1", bad=True).outcome == "KeyError: 'x'"


def test_document() -> None:
    results = [
        line("findings", "word a:1"),
        line("incomplete", "missing a:1"),
        line("exact", "missing a:2", bad=True),
        line("whole", "flip b:1", command="stat /"),
    ]
    text = document([Batch("memory of 6.1", "", results)], "abc", "2026-01-02").splitlines()
    assert text[0] == "commit abc, 2026-01-02: 4 runs, 1 bad"
    assert text[2].split()[-7:] == [
        "runs",
        "exact",
        "whole",
        "findings",
        "incomplete",
        "refused",
        "bad",
    ]
    assert text[3].split()[-7:] == text[4].split()[-7:] == ["4", "0", "1", "1", "1", "0", "1"]
    assert text[6].startswith("audits, by damage to memory")
    assert text[-1].split() == ["all", "3", "0", "0", "1", "1", "0", "1"]
