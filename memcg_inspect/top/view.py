# SPDX-License-Identifier: LGPL-2.1-or-later
"""What top has read, what the user has chosen of it, and what a key changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import localtime, strftime
from typing import NamedTuple

from memcg_inspect.collect.counter_sample import Sample, item_names
from memcg_inspect.model import counted
from memcg_inspect.model_snapshot import MemcgKey
from memcg_inspect.report import Report
from memcg_inspect.top.lines import (
    DETAILS,
    DYING,
    Detail,
    Line,
    Walk,
    detail_lines,
    is_there,
    memcg_lines,
    sorted_lines,
    why_missing,
)
from memcg_inspect.top.reader import Failed, Result, Task
from memcg_inspect.top.screen import Page, Shown
from memcg_inspect.top.terminal import GONE

__all__ = ("Options", "View")

_KEYS = "q quit  h help  Enter into  i item  < > sort  / filter  a audit  Space now"
_DETAIL_KEYS = "q quit  h help  Esc back  Tab next  < > sort  / filter  Space now"
_CLOCK = "%H:%M:%S"
#: Rates over a window this many times as long as usual are told.
_LONG = 2

_Key = tuple[str | int | None, ...]


class _Verdict(NamedTuple):
    """What the last audit has found."""

    clock: str
    verdict: str
    findings: int
    faults: frozenset[MemcgKey]


@dataclass
class _Read:
    """What has been read: the last of each, and the one before it; why the last one failed."""

    sample: Sample | None = None
    sample_before: Sample | None = None
    walk: Walk | None = None
    walk_before: Walk | None = None
    verdict: _Verdict | None = None
    failed: dict[Task, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """
    What the user has chosen.

    :ivar item: the item of ``memory.stat`` that is shown
    :ivar sort: as in :func:`~memcg_inspect.top.lines.sorted_lines`
    :ivar is_reversed: whether the smallest are the first
    :ivar filter: text that the lines have
    :ivar hides_removed: whether removed memcgs are left out
    :ivar inside: the memcg whose charges are shown; ``None`` for all memcgs
    :ivar detail: which of its charges
    """

    item: str
    sort: str = "total"
    is_reversed: bool = False
    filter: str = ""
    hides_removed: bool = False
    inside: MemcgKey | None = None
    detail: Detail = DETAILS[0]


class _Place(NamedTuple):
    """Where the user is in a table."""

    chosen: _Key | None = None
    number: int = 0
    first: int = 0


class View:
    """
    The view, and its state.

    :ivar options: what the user has chosen
    :ivar is_ended: whether the user wants to quit
    :ivar doing: what is being read, for the state
    :ivar pace: seconds from one read to the next, for the title
    :ivar room: number of lines that there is room for
    :ivar node_room: number of nodes, likewise
    """

    def __init__(self, options: Options, every: float) -> None:
        self.options = options
        self.is_ended = False
        self.doing: Task | None = None
        self.pace = every
        self.room, self.node_room = 1, 0
        self._typed: str | None = None
        self._help: int | None = None
        self._place = _Place()
        #: Place and filter in the table of all memcgs, while one memcg is shown.
        self._outside: tuple[_Place, str] = (_Place(), "")
        self._first_node = 0
        #: What the user sees as chosen.
        self._pointed: Line | None = None
        self._read = _Read()
        #: The lines, and the options and the text that they were made for.
        self._made: tuple[tuple[Options, str | None], list[Line]] | None = None
        self._wanted: list[Task] = []
        self._cancelled: list[Task] = []

    def add(self, task: Task, found: Result) -> None:
        """Take what has been read."""
        read, self._made = self._read, None
        if isinstance(found, Failed):
            if found.why:
                read.failed[task] = found.why
            return
        read.failed.pop(task, None)
        if isinstance(found, Sample):
            read.sample_before, read.sample = read.sample, found
        elif isinstance(found, Walk):
            read.walk_before, read.walk = read.walk, found
        else:
            read.verdict = _verdict_of(found)

    def task(self) -> Task:
        """Return what the page needs."""
        return "sample" if self.options.inside is None else "walk"

    def wanted(self) -> list[Task]:
        """Return what the user has asked for since the last call."""
        found, self._wanted = self._wanted, []
        return found

    def cancelled(self) -> list[Task]:
        """Return what the user does not want any more, since the last call."""
        found, self._cancelled = self._cancelled, []
        return found

    def is_whole(self) -> bool:
        """Return whether everything could be read the last time."""
        return not self._read.failed and not self._unread()

    def help_part(self) -> int | None:
        """Return which part of the help is shown; ``None`` for none."""
        return self._help

    def close_help(self) -> None:
        """Show the page again."""
        self._help = None

    def page(self) -> Page:
        """Return the page."""
        inside = self.options.inside
        return Page(
            title=self._title(),
            state=self._state(),
            path="" if inside is None else inside.path,
            label="memcg" if inside is None else self.options.detail,
            nodes=self._nodes(),
            lines=self._lines(),
            keys=self._typing() or (_KEYS if inside is None else _DETAIL_KEYS),
            is_alarm=bool(self._read.failed or self._faults()),
        )

    def shown(self) -> Shown:
        """Return which part of the page is shown, and remember what is chosen there."""
        lines, place = self._lines(), self._place
        number = self._number(lines)
        if number is None:
            self._pointed = None
            return Shown(self.options.sort, None, 0, self._first_node)
        first = min(max(place.first, number - self.room + 1), number)
        first = max(0, min(first, len(lines) - self.room))
        # Who has chosen no line looks at the first one. What comes there later is another one.
        chosen = lines[number].key if place.chosen is not None else None
        self._place = _Place(chosen, number, first)
        self._pointed = lines[number]
        return Shown(self.options.sort, number, first, self._first_node)

    def key(self, name: str) -> None:
        """Do what a key is for."""
        if name == GONE:
            self.is_ended = True
        elif self._typed is not None:
            self._type(name)
        elif self._help is not None:
            self._help += 1
        elif name in _MOVES:
            self._move(name)
        elif name in _ACTIONS:
            _ACTIONS[name](self)

    def _nodes(self) -> tuple[int, ...]:
        if self.options.inside is None:
            return () if self._read.sample is None else self._read.sample.nodes
        return () if self._read.walk is None else self._read.walk.snapshot.image.nodes

    def _title(self) -> tuple[str, ...]:
        """Return the time of what is shown, and what it is of."""
        sample, walk = self._read.sample, self._read.walk
        states: list[str]
        if self.options.inside is not None and walk is not None:
            clock, image = walk.clock, walk.snapshot.image
            states = [memcg.state for memcg in walk.snapshot.memcgs]
        elif self.options.inside is None and sample is not None:
            clock, image = sample.clock, sample.image
            states = [memcg.state for memcg in sample.memcgs.values()]
        else:
            return ("memcg-inspect top",)
        removed = f", {states.count('dying'):,} removed" if "dying" in states else ""
        return (
            f"memcg-inspect top {strftime(_CLOCK, localtime(clock))}",
            f"{counted(len(states), 'memcgs')}{removed}",
            f"every {self.pace:.0f} s",
            image.host,
            image.release,
        )

    def _state(self) -> tuple[str, ...]:
        """Return what there is to know of the page, what is not as usual first."""
        read, options = self._read, self.options
        parts = [f"{task} failed: {why}" for task, why in read.failed.items()]
        if self.doing in ("audit", "walk"):
            parts.append(f"{'auditing' if self.doing == 'audit' else 'reading'} ... (Esc cancels)")
        elif options.inside is not None and read.walk is None:
            parts.append("not read yet: press Space")
        parts += self._missing()
        order = f"by {options.sort}{', the smallest first' if options.is_reversed else ''}"
        parts.append(f"{options.item if options.inside is None else options.detail} {order}")
        if options.filter:
            parts.append(f"with {options.filter!r}")
        if options.hides_removed and options.inside is None:
            parts.append("without removed ones")
        if read.verdict is not None:
            findings = f", {read.verdict.findings:,} findings" if read.verdict.findings else ""
            parts.append(f"audit {read.verdict.clock}: {read.verdict.verdict}{findings}")
        window = self._window()
        if window > _LONG * self.pace:
            parts.append(f"rates over {window:,.0f} s")
        return tuple(parts)

    def _missing(self) -> list[str]:
        """Return what of the page is not known."""
        read, options = self._read, self.options
        parts = [f"{unread:,} not read"] if (unread := self._unread()) else []
        if options.inside is None or read.walk is None:
            return parts
        if not is_there(read.walk, options.inside):
            parts.append("removed: its parent is charged for what is left")
        elif options.detail == "call sites" and read.walk.snapshot.sites is None:
            parts.append("this kernel does not profile allocations")
        parts += [
            f"{kind} not known: {why}"
            for kind, why in why_missing(read.walk, options.detail).items()
        ]
        return parts

    def _unread(self) -> int:
        read = self._read
        if self.options.inside is None:
            return 0 if read.sample is None else read.sample.unread
        return 0 if read.walk is None else sum(read.walk.snapshot.unread.values())

    def _window(self) -> float:
        """Return the seconds that rates are over; 0 if there are none."""
        read = self._read
        now: Sample | Walk | None = read.walk
        before: Sample | Walk | None = read.walk_before
        if self.options.inside is None:
            now, before = read.sample, read.sample_before
        return 0.0 if now is None or before is None else now.seconds - before.seconds

    def _faults(self) -> frozenset[MemcgKey]:
        return frozenset() if self._read.verdict is None else self._read.verdict.faults

    def _lines(self) -> list[Line]:
        asked = self.options, self._typed
        if self._made is None or self._made[0] != asked:
            self._made = asked, self._make_lines()
        return self._made[1]

    def _make_lines(self) -> list[Line]:
        read, options = self._read, self.options
        found: list[Line] = []
        if options.inside is not None and read.walk is not None:
            memcg, detail = options.inside, options.detail
            found = detail_lines(read.walk, read.walk_before, memcg, detail, self._nodes())
        elif options.inside is None and read.sample is not None:
            found = memcg_lines(read.sample, read.sample_before, options.item, self._faults())
        text = self._typed if self._typed is not None else options.filter
        wanted = (
            line
            for line in found
            if text in line.label and not (options.hides_removed and DYING in line.marks)
        )
        return sorted_lines(wanted, options.sort, self._nodes(), options.is_reversed)

    def _number(self, lines: list[Line]) -> int | None:
        """Return the index of the line that is chosen, or that is where it was."""
        if not lines:
            return None
        if self._place.chosen is None:
            return 0
        number = next((n for n, line in enumerate(lines) if line.key == self._place.chosen), None)
        return min(self._place.number, len(lines) - 1) if number is None else number

    def _move(self, name: str) -> None:
        lines = self._lines()
        number = self._number(lines)
        if number is None:
            return
        number = _MOVES[name](number, self.room, len(lines))
        number = max(0, min(number, len(lines) - 1))
        self._place = self._place._replace(chosen=lines[number].key, number=number)

    def _typing(self) -> str:
        return "" if self._typed is None else f"only lines with: {self._typed}_   Enter, Esc"

    def _type(self, name: str) -> None:
        assert self._typed is not None
        if name == "enter":
            self.options = replace(self.options, filter=self._typed)
            self._typed = None
        elif name == "escape":
            self._typed = None
        elif name == "backspace":
            self._typed = self._typed[:-1]
        elif name == "erase":
            self._typed = ""
        elif len(name) == 1 and name.isprintable():
            self._typed += name

    def end(self) -> None:
        """Quit."""
        self.is_ended = True

    def help(self) -> None:
        """Show help."""
        self._help = 0

    def start_filter(self) -> None:
        """Let the user type what lines are to contain."""
        self._typed = self.options.filter

    def audit(self) -> None:
        """Ask for an audit."""
        self._wanted.append("audit")

    def now(self) -> None:
        """Ask for what the page needs."""
        self._wanted.append(self.task())

    def enter(self) -> None:
        """Show what the memcg is charged for that the user points at."""
        line = self._pointed
        if self.options.inside is not None or line is None:
            return
        path, cgroup_id, _ = line.key
        assert isinstance(path, str)
        assert not isinstance(cgroup_id, str)
        self._outside = self._place._replace(chosen=line.key), self.options.filter
        self._place = _Place()
        self.options = replace(self.options, inside=MemcgKey(path, cgroup_id), filter="")
        # What was read of it long ago is not what it is now.
        self._read.walk = self._read.walk_before = self._made = None
        self._wanted.append("walk")

    def back(self) -> None:
        """Cancel what is being read, show all memcgs, or no longer only some of the lines."""
        if self.doing == "audit":
            self._cancelled.append("audit")
        elif self.options.inside is not None:
            self._place, text = self._outside
            self.options = replace(self.options, inside=None, filter=text)
            self._read.failed.pop("walk", None)
            self._cancelled.append("walk")
            self._wanted.append("sample")
        else:
            self.options = replace(self.options, filter="")

    def next_detail(self, step: int) -> None:
        """Show other parts of what a memcg is charged for."""
        if self.options.inside is not None:
            detail = DETAILS[(DETAILS.index(self.options.detail) + step) % len(DETAILS)]
            self.options = replace(self.options, detail=detail)
            self._place = _Place()

    def next_item(self, step: int) -> None:
        """Show another item of ``memory.stat``."""
        if self._read.sample is not None and self.options.inside is None:
            names = item_names(self._read.sample)
            now = names.index(self.options.item) if self.options.item in names else -step
            self.options = replace(self.options, item=names[(now + step) % len(names)])

    def next_sort(self, step: int) -> None:
        """Sort by another column."""
        columns = ["name", "total", "rate", *(f"node {nid}" for nid in self._nodes())]
        now = columns.index(self.options.sort) if self.options.sort in columns else 1
        sort = columns[max(0, min(now + step, len(columns) - 1))]
        self.options = replace(self.options, sort=sort)

    def reverse(self) -> None:
        """Sort the other way round."""
        self.options = replace(self.options, is_reversed=not self.options.is_reversed)

    def hide_removed(self) -> None:
        """Leave removed memcgs out, or show them."""
        self.options = replace(self.options, hides_removed=not self.options.hides_removed)

    def next_node(self, step: int) -> None:
        """Show other nodes."""
        most = max(0, len(self._nodes()) - self.node_room)
        self._first_node = max(0, min(self._first_node + step, most))


def _verdict_of(report: Report) -> _Verdict:
    keys = {memcg.address: MemcgKey(memcg.path, memcg.cgroup_id) for memcg in report.memcgs}
    faults = {keys[f.memcg] for f in report.findings if f.memcg in keys}
    clock = strftime(_CLOCK)
    return _Verdict(clock, report.verdict.upper(), len(report.findings), frozenset(faults))


#: Where a key moves to: from the index of a line, a number of lines that fit, and of all lines.
_MOVES: dict[str, Callable[[int, int, int], int]] = {
    "up": lambda now, room, all_: now - 1,
    "down": lambda now, room, all_: now + 1,
    "page up": lambda now, room, all_: now - room,
    "page down": lambda now, room, all_: now + room,
    "home": lambda now, room, all_: 0,
    "end": lambda now, room, all_: all_ - 1,
}
_MOVES |= {"k": _MOVES["up"], "j": _MOVES["down"]}

_ACTIONS: dict[str, Callable[[View], None]] = {
    "q": View.end, "h": View.help, "?": View.help, "/": View.start_filter, "a": View.audit,
    " ": View.now, "enter": View.enter, "escape": View.back,
    "R": View.reverse, "r": View.hide_removed,
    "tab": lambda view: view.next_detail(1), "back tab": lambda view: view.next_detail(-1),
    "i": lambda view: view.next_item(1), "I": lambda view: view.next_item(-1),
    ">": lambda view: view.next_sort(1), "<": lambda view: view.next_sort(-1),
    "right": lambda view: view.next_node(1), "left": lambda view: view.next_node(-1),
}  # fmt: skip
