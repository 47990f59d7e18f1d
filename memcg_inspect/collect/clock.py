# SPDX-License-Identifier: LGPL-2.1-or-later
"""Time spent on each step of an audit, and what it read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from memcg_inspect.image.image import Image
from memcg_inspect.report import Reads

__all__ = ("Clock",)


class Clock:
    """
    Measures the steps of an audit and reports each as progress.

    :ivar seconds: seconds spent so far, by step
    :ivar reads: reads so far, by step
    """

    def __init__(self, image: Image) -> None:
        self.seconds: dict[str, float] = {}
        self.reads: dict[str, Reads] = {}
        self._progress, self._memory = image.progress, image.memory

    @contextmanager
    def measure(self, step: str) -> Iterator[None]:
        """Report that a step begins, and add the time that it takes, and what it reads."""
        start, before = time.perf_counter(), self._so_far()
        self._progress.report(step, 0.0)
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start
            known, now = self.reads.get(step, Reads()), self._so_far()
            self.reads[step] = Reads(
                known.reads + now.reads - before.reads, known.bytes + now.bytes - before.bytes
            )

    def _so_far(self) -> Reads:
        return Reads(self._memory.reads, self._memory.bytes_read)
