# SPDX-License-Identifier: LGPL-2.1-or-later
"""How often a running machine is read."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest

from memcg_inspect import running


class Clock:
    """A clock that only moves as it is told: of the wall, and of the CPU time of this thread."""

    def __init__(self) -> None:
        self.wall, self.cpu = 100.0, 0.0

    def sleep(self, seconds: float) -> None:
        self.wall += seconds

    def spend(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(
        monotonic=lambda: clock.wall, thread_time=lambda: clock.cpu, sleep=clock.sleep
    )
    monkeypatch.setattr(running, "time", fake)
    return clock


def test_one_read_after_the_other(clock: Clock) -> None:
    times = []
    for _ in running.paced(5, 4):
        times.append(clock.wall)
        clock.spend(0.5, 0.1)
    assert times == [100, 105, 110, 115]
    assert clock.wall == 115.5  # nobody waits after the last one


def test_a_read_that_takes_long_is_followed_by_a_long_pause(clock: Clock) -> None:
    times = []
    for _ in running.paced(5, 3):
        times.append(clock.wall)
        clock.spend(2, 2)
    assert times == [100, 120, 140]


def test_time_that_the_reader_of_the_output_takes_is_no_cost(clock: Clock) -> None:
    times = []
    for _ in running.paced(5, 3):
        times.append(clock.wall)
        clock.spend(60, 0.1)
    assert times == [100, pytest.approx(160.9), pytest.approx(221.8)]


def test_the_first_read_was_made_before(clock: Clock) -> None:
    times = []
    for _ in islice(running.paced(5, None, spent=1.0), 3):
        times.append(clock.wall)
    assert times == [100, 109, 114]
