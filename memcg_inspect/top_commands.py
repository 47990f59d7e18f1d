# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command ``top``: memcgs by node, with rates, on a terminal that is refreshed."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from drgn import Program
from rich.text import Text

from memcg_inspect.collect.counter_sample import Sample, item_names
from memcg_inspect.model import ImageError
from memcg_inspect.output import check_output, give_up, is_written, say
from memcg_inspect.running import REST, opened_image, paced, signals_unwind
from memcg_inspect.tables import UsageError
from memcg_inspect.top.reader import Failed, Reader, Task, read
from memcg_inspect.top.screen import (
    Shown,
    help_lines,
    natural_size,
    page_lines,
    room_for_lines,
    room_for_nodes,
)
from memcg_inspect.top.terminal import Terminal, opened_terminal
from memcg_inspect.top.view import Options, View

__all__ = ("top",)

_INCOMPLETE = 3


def top(args: Namespace) -> int:
    """Run ``top``; return its exit status."""
    check_output()
    if args.core:
        raise UsageError("top reads running machines: overview -c reads a vmcore")
    if args.pause:
        raise UsageError("top: --pause would stop the guest all the time")
    with opened_image(args) as image:
        view, spent = _first(image.prog, args)
        if args.batch:
            return _batch(image.prog, view, args, spent)
        with signals_unwind(), _terminal() as terminal, _reading(image.prog, terminal) as reader:
            _Loop(view, terminal, reader, args, spent).run()
    if not view.is_ended:
        # What was seen last stays on the terminal.
        _print(view)
    return 0 if view.is_whole() else _INCOMPLETE


def _first(prog: Program, args: Namespace) -> tuple[View, float]:
    """
    Read the machine for the first time, and check the arguments.

    :return: the view, and the CPU time of the read in seconds
    :raises MemcgInspectError: if there is nothing to show
    """
    began = time.thread_time()
    found = read(prog, "sample")
    spent = time.thread_time() - began
    if isinstance(found, Failed):
        raise ImageError(found.why)
    assert isinstance(found, Sample)
    names = item_names(found)
    if args.item not in names:
        raise UsageError(f"--item: this kernel has {', '.join(names)}")
    column, _, order = args.sort.partition(":")
    columns = ("name", "total", "rate", *(f"node {nid}" for nid in found.nodes))
    if column not in columns or order not in ("", "asc", "desc"):
        raise UsageError(f"--sort takes a column, and :asc or :desc: {', '.join(columns)}")
    is_first = "desc" if column == "name" else "asc"
    view = View(Options(args.item, column, order == is_first, args.filter), args.every)
    view.add("sample", found)
    return view, spent


def _batch(prog: Program, view: View, args: Namespace, spent: float) -> int:
    """Print pages until nobody reads them; return the exit status."""
    is_whole = True
    for number, _ in enumerate(paced(args.every, args.count, spent)):
        if number:
            found = read(prog, "sample")
            view.add("sample", found)
            if isinstance(found, Failed):
                say(f"memcg-inspect: {found.why}")
                is_whole = False
                continue
        is_whole = is_whole and view.is_whole()
        if not _print(view):
            break
    return 0 if is_whole else _INCOMPLETE


def _print(view: View) -> bool:
    """Print the page, whole; return whether anybody reads it."""
    page = view.page()._replace(keys="")
    sort = view.options.sort
    lines = page_lines(page, Shown(sort), *natural_size(page))
    return is_written("".join(f"{line.plain.rstrip()}\n" for line in [*lines[:-1], Text("")]))


@contextmanager
def _terminal() -> Iterator[Terminal]:
    opened: Terminal | None = None
    try:
        with opened_terminal() as opened:
            yield opened
    finally:
        if opened is not None and opened.is_gone:
            give_up(sys.stdout)


@contextmanager
def _reading(prog: Program, terminal: Terminal) -> Iterator[Reader]:
    reader = Reader(prog, terminal.wake)
    reader.start()
    try:
        yield reader
    finally:
        reader.end()


class _Loop:
    """Shows what is read, and does what keys are for, until the user quits."""

    def __init__(
        self, view: View, terminal: Terminal, reader: Reader, args: Namespace, spent: float
    ) -> None:
        self._view, self._terminal, self._reader = view, terminal, reader
        self._every: float = args.every
        # One has been read.
        self._left: int | None = None if args.count is None else args.count - 1
        #: When each is read again, and how long the pause before is.
        self._due: dict[Task, float] = {}
        self._pauses: dict[Task, float] = {}
        self._rests("sample", spent)

    def run(self) -> None:
        """Run until the end."""
        view, terminal = self._view, self._terminal
        while not view.is_ended:
            view.doing = self._reader.doing()
            view.pace = self._pauses.get(view.task(), self._every)
            terminal.show(self._lines())
            if self._left is not None and self._left <= 0:
                return
            for key in terminal.wait(self._pause()):
                view.key(key)
            self._reader.cancel(*view.cancelled())
            for task in view.wanted():
                self._reader.want(task)
            self._take()
            if not self._reader.is_busy() and time.monotonic() >= self._next():
                self._due[view.task()] = time.monotonic() + self._every
                self._reader.want(view.task())

    def _next(self) -> float:
        """Return when what the page needs is read again."""
        return self._due.setdefault(self._view.task(), time.monotonic() + self._every)

    def _pause(self) -> float:
        """Return how long nothing happens without keys: results wake the terminal."""
        if self._reader.is_busy():
            return self._every
        return self._next() - time.monotonic()

    def _lines(self) -> list[Text]:
        view, (width, height) = self._view, self._terminal.size()
        part = view.help_part()
        if part is not None:
            if lines := help_lines(part, height):
                return lines
            view.close_help()
        view.room, view.node_room = room_for_lines(height), room_for_nodes(width)
        return page_lines(view.page(), view.shown(), width, height)

    def _take(self) -> None:
        """Take what has been read."""
        for task, found, spent in self._reader.results():
            self._view.add(task, found)
            if task != "audit" and self._left is not None:
                self._left -= 1
            self._rests(task, spent)

    def _rests(self, task: Task, spent: float) -> None:
        """Let the machine rest from a read for some time."""
        self._pauses[task] = max(self._every, REST * spent)
        self._due[task] = time.monotonic() + self._pauses[task]
