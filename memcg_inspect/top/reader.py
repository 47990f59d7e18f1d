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
    A read that failed.

    :ivar why: one line
    """

    task: Task
    why: str


Result = Sample | Walk | Report | Failed


def read(prog: Program, task: Task, keep: Callable[[Image], None] | None = None) -> Result:
    """
    Read the machine once.

    :param keep: called with the image before it is read, which can be cancelled then
    """
    # A new image: nodes, memory and CPUs may have come and gone.
    image = Image(prog)
    if keep is not None:
        keep(image)
    began = time.monotonic()
    try:
        with as_image_errors():
            if task == "sample":
                return take_sample(image)
            if task == "walk":
                return Walk(began, take_snapshot(image))
            # What is seen all the time need not be waited for.
            return audit(image, 0.0)
    except MemcgInspectError as error:
        return Failed(task, str(error))


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
        self._results: list[tuple[Result, float]] = []
        self._image: Image | None = None
        self._is_ended = False
        self.doing: Task | None = None
        self.error: BaseException | None = None

    def want(self, task: Task) -> None:
        """Read something as soon as possible, unless that waits already."""
        with self._changed:
            if task not in self._wanted and task != self.doing:
                self._wanted.append(task)
                self._changed.notify()

    def results(self) -> list[tuple[Result, float]]:
        """
        Return what has been read since the last call, with the seconds that it took.

        :raises BaseException: what ended the thread
        """
        with self._changed:
            found, self._results = self._results, []
            if self.error is not None:
                raise self.error
            return found

    def is_busy(self) -> bool:
        """Return whether something is being read, or will be."""
        with self._changed:
            return self.doing is not None or bool(self._wanted)

    def run(self) -> None:
        """Read until :meth:`end`."""
        try:
            while (task := self._next()) is not None:
                began = time.monotonic()
                found = read(self._prog, task, self._keep)
                with self._changed:
                    self._results.append((found, time.monotonic() - began))
                    self.doing = None
                self._done()
        except BaseException as error:  # the other thread raises it
            with self._changed:
                self.error = error
            self._done()

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._is_ended)
            self.doing = None if self._is_ended else self._wanted.pop(0)
            return self.doing

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
