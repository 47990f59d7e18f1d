# SPDX-License-Identifier: LGPL-2.1-or-later
"""Views of a kernel that runs: what is freed while it is read is read again."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from memcg_inspect.answers import _answer_of
from memcg_inspect.model import Coverage, MemcgInspectError
from memcg_inspect.tables import Answer


class Running:
    """
    A view whose answers a test gives.

    :ivar missed: addresses that each answer could not read
    :ivar stop_at: number of the answer during which the user presses Ctrl-C
    """

    def __init__(self, *missed: Iterable[int], stop_at: int | None = None) -> None:
        self.missed: list[Iterable[int] | Exception] = [*missed]
        self.stop_at, self.runs = stop_at, 0
        self.progress = SimpleNamespace(stop=False)
        self.image: Any = SimpleNamespace(is_moving=True, keeps_walks=True, progress=self.progress)

    def run(self, image: Any, args: Namespace) -> Answer:
        self.runs += 1
        self.progress.stop = self.runs == self.stop_at
        coverage = Coverage()
        missed = self.missed[self.runs - 1]
        if isinstance(missed, Exception):
            raise missed
        for address in missed:
            coverage.miss("page", address, "it is gone")
        return Answer("pages", None, (), {"pages": coverage})

    def found(self) -> tuple[int, list[int]]:
        """Return how often the kernel was read, and what is missing then."""
        coverage = _answer_of(self.image, Namespace(view=self)).coverage["pages"]
        return self.runs, [example.address for example in coverage.examples]


def test_all_was_read() -> None:
    assert Running([]).found() == (1, [])


def test_what_is_gone_the_next_time() -> None:
    assert Running([1, 2], []).found() == (2, [])
    assert Running([1, 2], [3], []).found() == (3, [])


def test_what_is_damaged_is_still_there() -> None:
    """Twice is enough. What was freed during one of the two is not reported."""
    assert Running([1, 2], [1]).found() == (2, [1])
    assert Running([1], [1, 2]).found() == (2, [1])
    assert Running([1], [2, 3], [3]).found() == (3, [3])


def test_a_machine_that_never_rests() -> None:
    assert Running([1, 2], [3, 4], [5], [6, 7]).found() == (4, [5])


def test_what_was_asked_for_is_removed_meanwhile() -> None:
    """What was found before counts."""
    running = Running([1])
    running.missed.append(MemcgInspectError("no such memcg"))
    assert running.found() == (2, [1])


@pytest.mark.parametrize(("stop_at", "missing"), [(1, [1]), (2, [1]), (3, [1])])
def test_interrupted(stop_at: int, missing: list[int]) -> None:
    """What was interrupted is used only if there is nothing else."""
    assert Running([1], [2, 3], [], stop_at=stop_at).found() == (stop_at, missing)
