# SPDX-License-Identifier: LGPL-2.1-or-later
"""The search for the causes of ten faults is less work than the audit itself."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.diagnosing import at_once, judged
from support.guests import Lab
from support.planting import Fault, Subject

from memcg_inspect import collect

pytestmark = pytest.mark.image


class Calls:
    """Counts calls of functions, inside of some functions and outside of them."""

    def __init__(self) -> None:
        self.number: Counter[bool] = Counter()
        self._inside = False

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is counted by itself."""

        def called(*args: object) -> Any:
            self._inside = True
            try:
                return function(*args)
            finally:
                self._inside = False

        return called

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is called meanwhile. Calls are the same on any machine; seconds are not."""
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _count(self, frame: object, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            self.number[self._inside] += 1


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize("kernel", ["7.3", "6.1"])
def test_ten_faults_at_once(
    lab: Lab, kernel: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, calls = Subject(lab.image(kernel, "4", "mixed").program()), Calls()
    planted = at_once(subject, 10, seed)
    assert len(planted) == 10
    for name in ("find_words", "diagnose", "half_done_charges"):
        monkeypatch.setattr(collect, name, calls.within(getattr(collect, name)))
    with calls.counted():
        writes = tuple(write for _, fault in planted for write in fault.writes)
        report = subject.audit(Fault(writes, (), set()))
    result = judged(subject, planted, report)
    assert result.wrongly_sure == ()
    assert result.named, result.said
    assert 0 < calls.number[True] < calls.number[False], calls.number
