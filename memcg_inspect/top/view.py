# SPDX-License-Identifier: LGPL-2.1-or-later
"""What top has read, what the user has chosen of it, and what a key changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from memcg_inspect.collect.counter_sample import Sample, item_names
from memcg_inspect.model import counted
from memcg_inspect.report import Report
from memcg_inspect.top.lines import (
    DETAILS,
    DYING,
    Detail,
    Line,
    Walk,
    detail_lines,
    memcg_lines,
    sorted_lines,
)
from memcg_inspect.top.reader import Failed, Result, Task
from memcg_inspect.top.screen import Page, Shown

__all__ = ("View",)

_KEYS = "q quit  h help  Enter into  i item  < > sort  / filter  a audit  Space now"
_DETAIL_KEYS = "q quit  h help  Esc back  Tab next  < > sort  / filter  Space now"


@dataclass
class _Read:
    """What has been read: the last of each, and the one before it."""

    sample: Sample | None = None
    sample_before: Sample | None = None
    walk: Walk | None = None
    walk_before: Walk | None = None
    report: Report | None = None
    audited: str = ""
    failed: str = ""


@dataclass
class View:
    """
    The view, and its state.

    :ivar every: seconds from one read to the next, for the title
    :ivar item: the item of ``memory.stat`` that is shown
    :ivar sort: as in :func:`~memcg_inspect.top.lines.sorted_lines`
    :ivar inside: path of the memcg whose charges are shown; ``None`` for all memcgs
    :ivar is_ended: whether the user wants to quit
    :ivar wants_help: whether help is shown
    :ivar doing: what is being read, for the state
    """

    every: int
    item: str
    sort: str = "total"
    inside: str | None = None
    detail: Detail = DETAILS[0]
    filter: str = ""
    is_ended: bool = False
    wants_help: bool = False
    doing: Task | None = None
    _typed: str | None = None
    _chosen: tuple[str | int | None, ...] | None = None
    _first: int = 0
    _first_node: int = 0
    _read: _Read = field(default_factory=_Read)
    _wanted: list[Task] = field(default_factory=list)

    def add(self, found: Result) -> None:
        """Take what has been read."""
        read = self._read
        if isinstance(found, Failed):
            read.failed = f"not read: {found.why}"
            return
        read.failed = ""
        if isinstance(found, Sample):
            read.sample_before, read.sample = read.sample, found
        elif isinstance(found, Walk):
            read.walk_before, read.walk = read.walk, found
        else:
            read.report, read.audited = found, time.strftime("%H:%M:%S")

    def task(self) -> Task:
        """Return what the page needs."""
        return "sample" if self.inside is None else "walk"

    def wanted(self) -> list[Task]:
        """Return what the user has asked for since the last call."""
        found, self._wanted = self._wanted, []
        return found

    def is_ready(self) -> bool:
        """Return whether there is something to show."""
        return self._read.sample is not None or bool(self._read.failed)

    def page(self) -> Page:
        """Return the page."""
        sample = self._read.sample
        nodes = sample.nodes if sample is not None else ()
        return Page(
            title=self._title(),
            state=self._state(),
            label="memcg" if self.inside is None else self.detail,
            nodes=nodes,
            lines=self._lines(),
            keys=self._typing() or (_KEYS if self.inside is None else _DETAIL_KEYS),
            is_alarm=bool(self._read.failed or self._faults()),
        )

    def shown(self, room: int) -> Shown:
        """
        Return what is shown of the page.

        :param room: number of lines that there is room for
        """
        lines = self._lines()
        chosen = self._chosen_index(lines)
        if chosen is not None:
            self._first = min(max(self._first, chosen - room + 1), chosen)
        self._first = max(0, min(self._first, len(lines) - room))
        return Shown(self.sort, chosen, self._first, self._first_node)

    def key(self, name: str, room: int) -> None:
        """Do what a key is for."""
        if self._typed is not None:
            self._type(name)
        elif self.wants_help:
            self.wants_help = False
        elif name in ("up", "down", "page up", "page down", "home", "end", "k", "j"):
            self._move(name, room)
        elif name in _ACTIONS:
            _ACTIONS[name](self)

    def _title(self) -> tuple[str, ...]:
        sample = self._read.sample
        if sample is None:
            return ("memcg-inspect top",)
        dying = sum(memcg.state == "dying" for memcg in sample.memcgs.values())
        removed = f", {dying:,} removed" if dying else ""
        what = counted(len(sample.memcgs), "memcgs")
        return (
            f"memcg-inspect top {time.strftime('%H:%M:%S')}",
            f"{what}{removed}",
            f"every {self.every} s",
            sample.image.host,
            sample.image.release,
        )

    def _state(self) -> str:
        read = self._read
        if read.failed:
            return read.failed
        what = f"{self.item}" if self.inside is None else f"{self.inside}: {self.detail}"
        parts = [f"{what}, by {self.sort}"]
        if self.filter:
            parts.append(f"with {self.filter!r}")
        if self.inside is not None and read.walk is None:
            parts.append("reading ...")
        elif self.inside is not None and self.detail == "call sites" and not self._has_sites():
            parts.append("this kernel does not profile allocations")
        missing = self._unread()
        if missing:
            parts.append(f"{missing:,} not read")
        if read.report is not None:
            found = f", {len(read.report.findings):,} findings" if read.report.findings else ""
            parts.append(f"audit {read.audited}: {read.report.verdict.upper()}{found}")
        if self.doing == "audit":
            parts.append("auditing ...")
        return "; ".join(parts)

    def _unread(self) -> int:
        read = self._read
        if self.inside is None:
            return 0 if read.sample is None else read.sample.unread
        return 0 if read.walk is None else sum(read.walk.snapshot.unread.values())

    def _has_sites(self) -> bool:
        return self._read.walk is not None and self._read.walk.snapshot.sites is not None

    def _faults(self) -> Collection[int]:
        report = self._read.report
        if report is None:
            return ()
        return {finding.memcg for finding in report.findings if finding.memcg is not None}

    def _lines(self) -> list[Line]:
        read = self._read
        nodes = () if read.sample is None else read.sample.nodes
        found: list[Line] = []
        if self.inside is not None and read.walk is not None:
            found = detail_lines(read.walk, read.walk_before, self.inside, self.detail, nodes)
        elif self.inside is None and read.sample is not None:
            found = memcg_lines(read.sample, read.sample_before, self.item, self._faults())
        text = self._typed if self._typed is not None else self.filter
        wanted = (line for line in found if text in line.label or (text == DYING in line.marks))
        return sorted_lines(wanted, self.sort, nodes)

    def _chosen_index(self, lines: list[Line]) -> int | None:
        if not lines:
            return None
        return next((n for n, line in enumerate(lines) if line.key == self._chosen), 0)

    def _move(self, name: str, room: int) -> None:
        lines = self._lines()
        if not lines:
            return
        now = self._chosen_index(lines) or 0
        step = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -room, "page down": room}
        number = {"home": 0, "end": len(lines) - 1}.get(name, now + step.get(name, 0))
        number = max(0, min(number, len(lines) - 1))
        # The first line stays the first one: what is on top may change all the time.
        self._chosen = lines[number].key if number else None

    def _typing(self) -> str:
        return "" if self._typed is None else f"only lines with: {self._typed}_   Enter, Esc"

    def _type(self, name: str) -> None:
        assert self._typed is not None
        if name == "enter":
            self.filter, self._typed = self._typed, None
        elif name == "escape":
            self._typed = None
        elif name == "backspace":
            self._typed = self._typed[:-1]
        elif len(name) == 1 and name.isprintable():
            self._typed += name

    def end(self) -> None:
        """Quit."""
        self.is_ended = True

    def help(self) -> None:
        """Show help."""
        self.wants_help = True

    def start_filter(self) -> None:
        """Let the user type what lines are to contain."""
        self._typed = ""

    def audit(self) -> None:
        """Ask for an audit."""
        self._wanted.append("audit")

    def now(self) -> None:
        """Ask for what the page needs."""
        self._wanted.append(self.task())

    def enter(self) -> None:
        """Show what the memcg that is chosen is charged for."""
        lines = self._lines()
        chosen = self._chosen_index(lines)
        if self.inside is None and chosen is not None:
            self.inside, self.filter, self._chosen, self._first = lines[chosen].label, "", None, 0
            self._wanted.append("walk")

    def back(self) -> None:
        """Show all memcgs, or no longer only some of the lines."""
        if self.inside is not None:
            self._chosen = None
            self.inside, self.filter, self._first = None, "", 0
            self._wanted.append("sample")
        self.filter = ""

    def next_detail(self, step: int) -> None:
        """Show other parts of what a memcg is charged for."""
        if self.inside is not None:
            self.detail = DETAILS[(DETAILS.index(self.detail) + step) % len(DETAILS)]
            self._chosen, self._first = None, 0

    def next_item(self, step: int) -> None:
        """Show another item of ``memory.stat``."""
        if self._read.sample is not None and self.inside is None:
            names = item_names(self._read.sample)
            now = names.index(self.item) if self.item in names else -step
            self.item = names[(now + step) % len(names)]

    def next_sort(self, step: int) -> None:
        """Sort by another column."""
        sample = self._read.sample
        nodes = () if sample is None else sample.nodes
        columns = ["name", "total", "rate", *(f"node {nid}" for nid in nodes)]
        now = columns.index(self.sort) if self.sort in columns else 1
        self.sort = columns[max(0, min(now + step, len(columns) - 1))]

    def next_node(self, step: int) -> None:
        """Show other nodes."""
        sample = self._read.sample
        most = 0 if sample is None else len(sample.nodes) - 1
        self._first_node = max(0, min(self._first_node + step, most))


_ACTIONS: dict[str, Callable[[View], None]] = {
    "q": View.end,
    "h": View.help,
    "?": View.help,
    "/": View.start_filter,
    "a": View.audit,
    " ": View.now,
    "enter": View.enter,
    "escape": View.back,
    "backspace": View.back,
    "tab": lambda view: view.next_detail(1),
    "back tab": lambda view: view.next_detail(-1),
    "i": lambda view: view.next_item(1),
    "I": lambda view: view.next_item(-1),
    ">": lambda view: view.next_sort(1),
    "<": lambda view: view.next_sort(-1),
    "right": lambda view: view.next_node(1),
    "left": lambda view: view.next_node(-1),
}
