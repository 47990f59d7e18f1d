# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The pass over all page frames, elsewhere
----------------------------------------

Processes of a :class:`~memcg_inspect.image.pool.Pool` open the image themselves, once for each
walk, and collect ranges of page frames.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator

from drgn import Program

from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.ranges import PassContext, RangeCollector
from memcg_inspect.image.image import Image
from memcg_inspect.image.pool import Pool
from memcg_inspect.image.processes import gathered
from memcg_inspect.linux.mm.mmzone import PageRange

__all__ = ("map_elsewhere",)


class _Opened(threading.local):
    """
    The image that this thread has opened. drgn does not let threads share a program.

    :ivar walk: the walk that it was opened for
    """

    walk = ""
    image: Image
    collector: RangeCollector


_opened = _Opened()


def _collected(
    open_image: Callable[[], Program], walk: str, context: PassContext, part: PageRange
) -> tuple[Partial, int, int]:
    """
    Return the result of a range, and the number of reads and of bytes that it took.

    :param walk: unique name of the walk
    """
    if _opened.walk != walk:
        _opened.image = Image(open_image())
        _opened.collector = RangeCollector(_opened.image, context)
        _opened.walk = walk
    memory = _opened.image.memory
    reads, size = memory.reads, memory.bytes_read
    return _opened.collector(part), memory.reads - reads, memory.bytes_read - size


def map_elsewhere(
    image: Image, pool: Pool, context: PassContext
) -> Callable[[Callable[[PageRange], Partial], Iterable[PageRange]], Iterator[Partial]]:
    """Return a function like ``map()`` that collects ranges in the processes of a pool."""

    def run(
        collector: Callable[[PageRange], Partial], parts: Iterable[PageRange]
    ) -> Iterator[Partial]:
        with pool.errors():
            shared, walk = pool.share(context), os.urandom(16).hex()
            running = [
                (part, pool.executor.submit(_collected, pool.open, walk, shared, part))
                for part in parts
            ]
            yield from gathered(image, collector, running, pool.wait)

    return run
