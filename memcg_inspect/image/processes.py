# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A walk in several processes
---------------------------

The parts of a walk are independent of each other, so processes can share them.
:func:`forked_map` takes the place of ``map()``. Its processes are forked: they inherit the program,
with what was read of the image so far, and need not open it again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from memcg_inspect.image.image import Image
from memcg_inspect.image.memory import Memory
from memcg_inspect.model import ImageError

__all__ = ("available_cores", "forked_map", "gathered")

P = TypeVar("P")
R = TypeVar("R")

#: What the processes of a walk call. They inherit it.
_function: Callable[[Any], Any] | None = None
_memory: Memory | None = None


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def forked_map(image: Image, jobs: int) -> Callable[[Callable[[P], R], Iterable[P]], Iterator[R]]:
    """
    Return a function like ``map()`` that uses processes.

    If the walk is cancelled, this process calls the function for the parts that no process has
    begun. It must then return at once.

    :param jobs: number of processes
    """

    def run(function: Callable[[P], R], parts: Iterable[P]) -> Iterator[R]:
        # Most commands need none of these modules.
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import active_children, get_context

        global _function
        _function = function
        context, (alive, ours) = get_context("fork"), os.pipe()
        try:
            with ProcessPoolExecutor(jobs, context, _begin, (image, alive, ours)) as pool:
                try:
                    running = [(part, pool.submit(_call, part)) for part in parts]
                except OSError as error:  # the first one starts the processes
                    for child in active_children():
                        child.kill()  # those before it would wait for ever
                        child.join()
                    why = f"{jobs} processes cannot be started: {error.strerror}: try --jobs 1"
                    raise ImageError(why) from error
                yield from gathered(image, function, running)
        except BrokenProcessPool as error:
            raise ImageError(
                "a process that was reading the image ended, for lack of memory perhaps: "
                "try --jobs 1"
            ) from error
        finally:
            _function = None
            os.close(ours)
            os.close(alive)

    return run


def gathered(
    image: Image,
    function: Callable[[P], R],
    running: Sequence[tuple[P, Future[tuple[R, int, int]]]],
    wait: Callable[[Future[Any]], None] = lambda future: None,
) -> Iterator[R]:
    """
    Yield the results of the parts of a walk, in their order.

    If the walk is cancelled, parts that have not begun are left to *function*.

    :param running: parts, and what will have the result, the reads and the bytes that were read
    :param wait: waits for a result; raises an error if it will never come
    """
    for part, future in running:
        if image.progress.stop:
            for _, other in running:
                other.cancel()
        if future.cancelled():
            yield function(part)
            continue
        wait(future)
        result, reads, size = future.result()
        image.memory.reads += reads
        image.memory.bytes_read += size
        yield result


def _begin(image: Image, alive: int, ours: int) -> None:
    """
    Prepare a process.

    :param alive: end of a pipe that is at its end when the process that began the walk is gone
    :param ours: the other end, which only that process keeps
    """
    global _memory
    _memory = image.memory
    image.progress.report = lambda what, share: None
    os.close(ours)
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()


def _end_with_parent(alive: int) -> None:
    os.read(alive, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _call(part: Any) -> tuple[Any, int, int]:
    """Return the result of a part, and the number of reads and of bytes that it took."""
    assert _function is not None and _memory is not None
    reads, size = _memory.reads, _memory.bytes_read
    return _function(part), _memory.reads - reads, _memory.bytes_read - size
