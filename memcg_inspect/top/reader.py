# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A thread that reads the machine
-------------------------------

drgn programs are read by one thread at a time. This one does all of it, so that keys are answered
while a walk takes its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from drgn import Program

from memcg_inspect.collect import audit
from memcg_inspect.collect.charge_snapshot import take_snapshot
from memcg_inspect.collect.counter_sample import Sample, take_sample
from memcg_inspect.image.image import Image
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.model import MemcgInspectError
from memcg_inspect.report import Report
from memcg_inspect.top.lines import Walk

__all__ = ("Failed", "Reader", "Result", "Task", "read")

Task = Literal["sample", "walk", "audit"]

#: Seconds that the end of a read is waited for.
_PATIENCE = 5.0


class Failed(NamedTuple):
    """
    A read that failed, or was cancelled.

    :ivar why: one line; empty if it was cancelled
    """

    why: str


Result = Sample | Walk | Report | Failed


class Done(NamedTuple):
    """
    A read that has ended.

    :ivar spent: CPU time that it took, in seconds
    """

    task: Task
    result: Result
    spent: float


def read(prog: Program, task: Task, keep: Callable[[Image], None] | None = None) -> Result:
    """
    Read the machine once.

    :param keep: called with the image before it is read, which can be cancelled then
    """
    # A new image: nodes, memory and CPUs may have come and gone.
    image = Image(prog)
    if keep is not None:
        keep(image)
    try:
        with as_image_errors():
            found = _read(image, task)
    except MemcgInspectError as error:
        return Failed("" if image.progress.stop else str(error))
    return Failed("") if image.progress.stop else found


def _read(image: Image, task: Task) -> Result:
    if task == "sample":
        return take_sample(image)
    if task == "walk":
        return Walk(time.monotonic(), time.time(), take_snapshot(image))
    # What is seen all the time need not be waited for.
    return audit(image, 0.0)


class Reader(threading.Thread):
    """
    The thread, which reads what :meth:`want` says, one thing after the other.

    :param prog: the program, which nobody else reads meanwhile
    :param done: called in this thread when there is a result
    """

    def __init__(self, prog: Program, done: Callable[[], None]) -> None:
        super().__init__(name="memcg-inspect top", daemon=True)
        self._prog, self._done = prog, done
        self._changed = threading.Condition()
        self._wanted: list[Task] = []
        self._results: list[Done] = []
        self._image: Image | None = None
        self._is_ended = False
        self._doing: Task | None = None
        self._error: BaseException | None = None

    def want(self, task: Task) -> None:
        """Read something as soon as possible, unless that waits already, or is being read."""
        with self._changed:
            if task not in self._wanted and task != self._doing:
                self._wanted.append(task)
                self._changed.notify()

    def results(self) -> list[Done]:
        """
        Return what has been read since the last call.

        :raises BaseException: what ended the thread
        """
        with self._changed:
            found, self._results = self._results, []
            if self._error is not None:
                raise self._error
            return found

    def doing(self) -> Task | None:
        """Return what is being read."""
        with self._changed:
            return self._doing

    def is_busy(self) -> bool:
        """Return whether something is being read, or will be."""
        with self._changed:
            return self._doing is not None or bool(self._wanted)

    def cancel(self, *tasks: Task) -> None:
        """End a read that is going on, and do not begin it."""
        with self._changed:
            self._wanted = [task for task in self._wanted if task not in tasks]
            if self._doing in tasks and self._image is not None:
                self._image.progress.stop = True

    def run(self) -> None:
        """Read until :meth:`end`."""
        try:
            while (task := self._next()) is not None:
                began = time.thread_time()
                found = read(self._prog, task, self._keep)
                with self._changed:
                    self._results.append(Done(task, found, time.thread_time() - began))
                    self._doing = self._image = None
                self._done()
        except BaseException as error:  # the other thread raises it
            with self._changed:
                self._error = error
            self._done()

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._is_ended)
            self._doing = None if self._is_ended else self._wanted.pop(0)
            return self._doing

    def _keep(self, image: Image) -> None:
        with self._changed:
            self._image = image
            image.progress.stop = self._is_ended

    def end(self) -> None:
        """Cancel what is being read, and end."""
        with self._changed:
            self._is_ended = True
            if self._image is not None:
                self._image.progress.stop = True
            self._changed.notify()
        self.join(_PATIENCE)
