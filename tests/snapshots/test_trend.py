# SPDX-License-Identifier: LGPL-2.1-or-later
"""The slope of Theil and Sen, and its interval."""

from __future__ import annotations

import random

import pytest

from memcg_inspect.snapshots.trend import trend_of


def test_a_line() -> None:
    trend = trend_of([0, 1, 3, 4, 8, 9], [5, 7, 11, 13, 21, 23])
    assert (trend.slope, trend.low, trend.high) == (2, 2, 2)
    assert (trend.grew, trend.windows, trend.grows) == (5, 5, True)


def test_the_median_of_pairs() -> None:
    """Slopes of 1/1, 9/2, 8/1: their median."""
    trend = trend_of([0, 1, 2], [0, 1, 9])
    assert trend.slope == 4.5
    assert (trend.low, trend.high) == (None, None)
    assert trend.grows


def test_an_outlier_does_not_move_it() -> None:
    values: list[float] = [10 * n for n in range(12)]
    values[5] = 100_000
    trend = trend_of([float(n) for n in range(12)], values)
    assert trend.slope == 10
    assert trend.grew == 10
    assert trend.low is not None
    assert trend.high is not None
    assert trend.low <= 10 <= trend.high
    assert trend.grows


def test_what_comes_and_goes_does_not_grow() -> None:
    trend = trend_of([float(n) for n in range(20)], [1000 * (n % 2) for n in range(20)])
    assert trend.slope == 0
    assert not trend.grows


def test_what_shrinks_does_not_grow() -> None:
    trend = trend_of([float(n) for n in range(10)], [-5 * n for n in range(10)])
    assert (trend.slope, trend.grew, trend.grows) == (-5, 0, False)


def test_what_does_not_change_does_not_grow() -> None:
    trend = trend_of([0, 1, 2, 3, 4, 5, 6], [3] * 7)
    assert (trend.slope, trend.low, trend.high, trend.grows) == (0, 0, 0, False)


def test_few_samples_have_no_interval() -> None:
    for count in (2, 3, 4):
        trend = trend_of([float(n) for n in range(count)], [n * n for n in range(count)])
        assert (trend.low, trend.high) == (None, None)


@pytest.mark.parametrize("count", [6, 10, 30])
def test_the_interval_has_the_slope(count: int) -> None:
    """Of samples with noise; 95 % is asked for, and fewer than 91 of 100 are most unlikely."""
    chance, inside = random.Random(count), 0
    for _ in range(400):
        values = [3 * n + chance.gauss(0, 10) for n in range(count)]
        trend = trend_of([float(n) for n in range(count)], values)
        assert trend.low is not None
        assert trend.high is not None
        assert trend.low <= trend.slope <= trend.high
        inside += trend.low <= 3 <= trend.high
    assert 364 <= inside < 400
