# SPDX-License-Identifier: LGPL-2.1-or-later
"""The command ``top``: memcgs by node, with rates, on a terminal that is refreshed."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from drgn import Program
from rich.text import Text

from memcg_inspect.collect.counter_sample import Sample, item_names
from memcg_inspect.model import ImageError
from memcg_inspect.output import check_output, output, say
from memcg_inspect.running import REST, opened_image, paced, signals_unwind
from memcg_inspect.tables import UsageError
from memcg_inspect.top.reader import Failed, Reader, read
from memcg_inspect.top.screen import HELP, Shown, natural_size, page_lines, room_for_lines
from memcg_inspect.top.terminal import Terminal, opened_terminal
from memcg_inspect.top.view import View

__all__ = ("top",)

_INCOMPLETE = 3


def top(args: Namespace) -> int:
    """Run ``top``; return its exit status."""
    check_output()
    if args.core:
        raise UsageError("top: a vmcore does not change: see overview")
    if args.pause:
        raise UsageError("top: --pause would stop the guest all the time")
    with opened_image(args) as image:
        first = _first(image.prog, args)
        view = View(args.every, args.item, args.sort)
        view.add(first)
        if args.batch:
            return _batch(image.prog, view, args)
        with signals_unwind(), opened_terminal() as terminal, _reading(image.prog, terminal) as r:
            _Loop(view, terminal, r, args.count).run()
    return 0


def _first(prog: Program, args: Namespace) -> Sample:
    """
    Read the machine for the first time, and check the arguments.

    :raises MemcgInspectError: if there is nothing to show
    """
    found = read(prog, "sample")
    if isinstance(found, Failed):
        raise ImageError(found.why)
    assert isinstance(found, Sample)
    names = item_names(found)
    if args.item not in names:
        raise UsageError(f"--item: this kernel has {', '.join(names)}")
    columns = ("name", "total", "rate", *(f"node {nid}" for nid in found.nodes))
    if args.sort not in columns:
        raise UsageError(f"--sort: the columns are {', '.join(columns)}")
    return found


def _batch(prog: Program, view: View, args: Namespace) -> int:
    """Print pages; return the exit status."""
    is_whole = True
    for number, _ in enumerate(paced(args.every, args.count)):
        if number:
            found = read(prog, "sample")
            view.add(found)
            if isinstance(found, Failed):
                say(f"memcg-inspect: {found.why}")
                is_whole = False
                continue
        page = view.page()._replace(keys="")
        lines = page_lines(page, Shown(view.sort), *natural_size(page))
        text = "".join(f"{line.plain.rstrip()}\n" for line in lines)
        output(partial(print, text, flush=True))
    return 0 if is_whole else _INCOMPLETE


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

    def __init__(self, view: View, terminal: Terminal, reader: Reader, count: int | None) -> None:
        self._view, self._terminal, self._reader = view, terminal, reader
        # One has been read.
        self._left = None if count is None else count - 1
        self._due = time.monotonic() + view.every

    def run(self) -> None:
        """Run until the end."""
        view, terminal = self._view, self._terminal
        while not view.is_ended:
            view.doing = self._reader.doing
            terminal.show(self._lines())
            if self._left == 0 and not self._reader.is_busy():
                return
            pause = self._due - time.monotonic()
            for key in terminal.wait(view.every if self._reader.is_busy() else pause):
                view.key(key, self._room())
            for task in view.wanted():
                self._reader.want(task)
            self._take()
            self._read_if_due()

    def _room(self) -> int:
        return room_for_lines(self._terminal.size()[1])

    def _lines(self) -> list[Text]:
        if self._view.wants_help:
            return [Text(line, no_wrap=True, overflow="ellipsis") for line in HELP]
        page, shown = self._view.page(), self._view.shown(self._room())
        return page_lines(page, shown, *self._terminal.size())

    def _take(self) -> None:
        """Take what has been read, and let the machine rest for a time."""
        for found, seconds in self._reader.results():
            self._view.add(found)
            now = time.monotonic()
            self._due = max(self._due, now + REST * seconds)

    def _read_if_due(self) -> None:
        now = time.monotonic()
        if now < self._due or self._reader.is_busy():
            return
        if self._left is not None:
            if not self._left:
                return
            self._left -= 1
        self._due = now + self._view.every
        self._reader.want(self._view.task())
