# SPDX-License-Identifier: LGPL-2.1-or-later
"""Time spent on each step of an audit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from memcg_inspect.image.progress import Progress

__all__ = ("Clock",)


class Clock:
    """
    Measures the steps of an audit and reports each as progress.

    :ivar seconds: seconds spent so far, by step
    """

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        """Report that a step begins, and add the time that it takes."""
        start = time.perf_counter()
        self._progress.report(step, 0.0)
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start
