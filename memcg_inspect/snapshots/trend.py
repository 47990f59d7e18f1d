# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Trends
------

The slope of Theil and Sen is the median of the slopes between all pairs of samples: up to 29 % of
the samples may be wrong, or be those of a short burst, without moving it far. Its interval follows
from the rank correlation of Kendall (P. K. Sen, "Estimates of the Regression Coefficient Based on
Kendall's Tau", Journal of the American Statistical Association 63, 1968).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import ceil, floor, sqrt
from statistics import NormalDist, median
from typing import NamedTuple

__all__ = ("Trend", "trend_of")

#: Probability that the interval has the true slope.
CONFIDENCE = 0.95


class Trend(NamedTuple):
    """
    How a value changed.

    :ivar slope: per unit of time
    :ivar low: lower end of the interval of the slope; ``None``: there are too few samples
    :ivar high: upper end
    :ivar grew: number of windows between samples in which it grew
    :ivar windows: number of windows
    """

    slope: float
    low: float | None
    high: float | None
    grew: int
    windows: int

    @property
    def grows(self) -> bool:
        """Whether it grew in every window, or its slope is certainly above 0."""
        if self.windows and self.grew == self.windows:
            return True
        return self.low is not None and self.low > 0


def trend_of(times: Sequence[float], values: Sequence[float]) -> Trend:
    """
    Return the trend of values.

    :param times: when they were, in ascending order, none twice; at least two
    """
    slopes = sorted(
        (values[j] - values[i]) / (times[j] - times[i])
        for i, j in combinations(range(len(times)), 2)
    )
    low, high = _interval(slopes, values)
    grew = sum(after > before for before, after in pairwise(values))
    return Trend(median(slopes), low, high, grew, len(values) - 1)


def _interval(
    slopes: Sequence[float], values: Sequence[float]
) -> tuple[float | None, float | None]:
    """
    Return the interval of a slope.

    :param slopes: between all pairs of samples, sorted
    """
    n = len(values)
    # The variance of Kendall's S, with its correction for values that are equal.
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    width = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * sqrt(variance)
    # Ranks from 1. The ends are the values at these ranks, rounded away from the middle.
    first, last = floor((len(slopes) - width) / 2), ceil((len(slopes) + width) / 2 + 1)
    if first < 1 or last > len(slopes):
        # The interval is not bounded by any slope, unless nothing changed at all.
        return (slopes[0], slopes[-1]) if slopes[0] == slopes[-1] and n > 3 else (None, None)
    return slopes[first - 1], slopes[last - 1]
