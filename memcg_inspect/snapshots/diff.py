# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What changed between snapshots
------------------------------

Of two snapshots, :func:`compared` shows how much each amount grew. Of more, it shows trends
(:mod:`memcg_inspect.snapshots.trend`), which tell a leak from what comes and goes. Memcgs are the
same if their paths are the same: addresses and IDs change with each boot.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import gmtime, strftime
from typing import Annotated, NamedTuple

from memcg_inspect.model import counted
from memcg_inspect.model_snapshot import (
    SITES,
    ChargeSnapshot,
    SavedCharge,
    SavedSite,
    SavedSlab,
    is_same_boot,
)
from memcg_inspect.snapshots.conservation import (
    ConservationRow,
    conservation_notes,
    conservation_table,
)
from memcg_inspect.snapshots.trend import trend_of
from memcg_inspect.tables import Answer, Field, NotRead, Table, UsageError, Value, columns_of
from memcg_inspect.views.view import Argument, View, by_argument, named

__all__ = (
    "DIFF",
    "WATCH",
    "GrowthRow",
    "MemcgRow",
    "Named",
    "SnapshotRow",
    "TrendRow",
    "compared",
    "largest_growth",
)

#: In nanoseconds.
_SECOND = 10**9
_DATE = "%Y-%m-%d %H:%M:%S"
_HOUR = 60 * 60 * _SECOND


class Named(NamedTuple):
    """A snapshot, and the name of its file."""

    name: str
    snapshot: ChargeSnapshot


@dataclass(frozen=True)
class _Places:
    """What rows are told apart by."""

    memcg: Annotated[
        str | None, Field("memcg", "memcg that pays; none if no memcg pays", priority=9)
    ]
    node: Annotated[int | None, Field("node", "node of the memory", priority=9)]
    charged_node: Annotated[
        int | None,
        Field(
            "node",
            "node of the obj_cgroup that pays, on kernels that have one for each node",
            priority=8,
        ),
    ]
    kind: Annotated[str | None, Field("text", "kind of charge", priority=9)]
    what: Annotated[
        str | None,
        Field("text", "part of the kind, such as the use of kernel pages", priority=8),
    ]
    cache: Annotated[str | None, Field("text", "cache of slab objects", priority=9)]
    site: Annotated[str | None, Field("text", "line of code that allocated it", priority=9)]


@dataclass(frozen=True)
class GrowthRow(_Places):
    """How much one amount grew from one snapshot to another."""

    before: Annotated[Value, Field("bytes", "bytes in the first snapshot", total=True, priority=6)]
    after: Annotated[Value, Field("bytes", "bytes in the second snapshot", total=True, priority=8)]
    growth: Annotated[
        Value,
        Field("difference", "growth in bytes", total=True, priority=9, in_bytes=True),
    ]
    number_growth: Annotated[
        Value,
        Field("difference", "growth of the number of charges or objects", total=True, priority=4),
    ]
    per_hour: Annotated[
        Value,
        Field(
            "difference",
            "growth in bytes per hour; none if the time between them is not known",
            total=True,
            priority=7,
            in_bytes=True,
        ),
    ]


@dataclass(frozen=True)
class TrendRow(_Places):
    """How one amount changed from snapshot to snapshot."""

    first: Annotated[Value, Field("bytes", "bytes in the first snapshot", total=True, priority=5)]
    last: Annotated[Value, Field("bytes", "bytes in the last snapshot", total=True, priority=8)]
    per_hour: Annotated[
        Value,
        Field(
            "difference",
            "slope in bytes per hour: the median of those between all pairs of snapshots",
            priority=9,
            in_bytes=True,
        ),
    ]
    low: Annotated[
        Value,
        Field(
            "difference",
            "lower end of the interval that has the slope with a probability of 95 %; none if "
            "there are too few snapshots",
            priority=6,
            in_bytes=True,
        ),
    ]
    high: Annotated[
        Value, Field("difference", "upper end of this interval", priority=6, in_bytes=True)
    ]
    grew: Annotated[
        int, Field("count", "windows between two snapshots in which it grew", priority=7)
    ]
    windows: Annotated[int, Field("count", "number of these windows", priority=5)]
    grows: Annotated[
        bool,
        Field(
            "flag", "whether it grew in every window, or the whole interval is above 0", priority=9
        ),
    ]


@dataclass(frozen=True)
class MemcgRow:
    """A memcg that only one of the first and the last snapshot has."""

    memcg: Annotated[str, Field("memcg", "path of the memcg", priority=9)]
    change: Annotated[str, Field("text", "new or gone", priority=9)]
    bytes: Annotated[
        int, Field("bytes", "what it is or was charged for", total=True, priority=8, shares=True)
    ]


@dataclass(frozen=True)
class SnapshotRow:
    """One of the snapshots."""

    snapshot: Annotated[str, Field("text", "its file, or the image", priority=9)]
    host: Annotated[str, Field("text", "name of the machine", priority=5)]
    release: Annotated[str, Field("text", "release of the kernel", priority=6)]
    time: Annotated[
        str | None, Field("text", "time of the machine (UTC); none if not known", priority=8)
    ]
    memcgs: Annotated[int, Field("count", "number of memcgs", priority=4)]
    dying: Annotated[int, Field("count", "removed memcgs among them", priority=4)]
    bytes: Annotated[int, Field("bytes", "what all memcgs are charged for", priority=7)]
    whole: Annotated[bool, Field("flag", "whether everything was read", priority=7)]


#: The dimensions of ``--by``.
DIMENSIONS = ("memcg", "node", "charged_node", "kind", "what", "cache", "site")
#: What each part of a snapshot can be told apart by.
_PARTS: dict[str, tuple[str, ...]] = {
    "charges": ("memcg", "node", "charged_node", "kind", "what"),
    "slabs": ("memcg", "node", "cache"),
    "sites": ("memcg", "node", "kind", "site"),
}
_TITLES = {"charges": "charges", "slabs": "slab objects", "sites": "allocations"}
#: What is compared without ``--by``.
_DEFAULT = (("memcg", "node", "kind"), ("memcg", "cache"), ("site",))

#: Subjects of what could not be read: memcgs, and their names.
_MEMCGS = frozenset({"memcgs", "names"})

_Key = tuple[Value, ...]
_Saved = SavedCharge | SavedSlab | SavedSite


def compared(snapshots: Sequence[Named], by: Sequence[str] | None = None) -> Answer:
    """
    Compare snapshots, in their order.

    :param snapshots: at least two
    :param by: any of :data:`DIMENSIONS` that one part of a snapshot has; by default, what usually
        tells where memory went
    :raises UsageError: if they cannot be told apart by that
    """
    wanted = [_checked(by)] if by else [w for w in _DEFAULT if not _lacks_sites(snapshots, w)]
    if by and _lacks_sites(snapshots, by):
        raise UsageError("--by site: not all of these kernels profile allocations")
    times = _times(snapshots)
    tables = [_table(snapshots, some, times) for some in wanted]
    ends = snapshots[0].snapshot, snapshots[-1].snapshot
    tables += [_memcgs(*ends), conservation_table(*ends)]
    rows = [_row_of(some) for some in snapshots]
    tables.append(Table("snapshots", "what is compared", columns_of(SnapshotRow), rows))
    return Answer(
        "diff",
        None,
        tuple(tables),
        notes=tuple(_notes(snapshots, times)),
        unanswered=not all(some.snapshot.is_whole for some in snapshots),
    )


def largest_growth(before: ChargeSnapshot, after: ChargeSnapshot) -> GrowthRow | None:
    """Return what grew most, by memcg, node and kind; ``None`` if nothing grew."""
    pair = (Named("before", before), Named("after", after))
    rows = _table(pair, _DEFAULT[0], None).rows
    return next((row for row in rows if isinstance(row.growth, int) and row.growth > 0), None)


def _checked(by: Iterable[str]) -> tuple[str, ...]:
    wanted = tuple(name for name in DIMENSIONS if name in by)
    _part_of(wanted)
    return wanted


def _part_of(by: Sequence[str]) -> str:
    """Return the first part of a snapshot that has these dimensions."""
    for part, known in _PARTS.items():
        if set(by) <= set(known):
            return part
    others = next(known for known in _PARTS.values() if {"cache", "site"} & {*by} & {*known})
    which = "cache" if "cache" in by else "site"
    rest = [name for name in others if name != which]
    raise UsageError(f"--by {which} can be combined with {named(rest)} only")


def _lacks_sites(snapshots: Iterable[Named], by: Sequence[str]) -> bool:
    return "site" in by and any(some.snapshot.sites is None for some in snapshots)


def _times(snapshots: Sequence[Named]) -> list[int] | None:
    """
    Return the times of snapshots in nanoseconds after the first one.

    :return: ``None`` if they are not known, or if a later one is not after the one before
    :raises UsageError: if there are more than two, and they are not in order
    """
    known = [some.snapshot.time for some in snapshots]
    clocks = [time for time in known if time is not None]
    if len(clocks) != len(known):
        return None
    first = snapshots[0].snapshot
    of_one_boot = all(is_same_boot(first, some.snapshot) for some in snapshots)
    times = [time.boottime if of_one_boot else time.realtime for time in clocks]
    for (before, one), (after, two) in pairwise(zip(times, snapshots, strict=True)):
        if after < before and len(snapshots) > 2:
            raise UsageError(f"{two.name} is older than {one.name}: name the older ones first")
        if after <= before:
            return None
    return [time - times[0] for time in times]


class _Amount(NamedTuple):
    """
    What is found of an amount.

    :ivar bytes: its bytes
    :ivar number: its charges or objects
    :ivar missing: why it may be more
    """

    bytes: int
    number: int
    missing: str | None


class _Part:
    """One part of a snapshot, added up by what rows are told apart by."""

    def __init__(self, some: Named, by: Sequence[str]) -> None:
        self._by, self._part, self._snapshot = by, _part_of(by), some.snapshot
        self._name = some.name
        rows: Iterable[_Saved] = getattr(self._snapshot, self._part) or ()
        self._bytes: Counter[_Key] = Counter()
        self._numbers: Counter[_Key] = Counter()
        for row in rows:
            key = tuple(self._value(row, name) for name in by)
            self._bytes[key] += row.bytes
            self._numbers[key] += row.number

    def _value(self, row: _Saved, name: str) -> Value:
        if name == "memcg":
            return _path(self._snapshot, row.memcg)
        value: Value = getattr(row, name)
        return value

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._bytes)

    def at(self, key: _Key) -> _Amount:
        """Return an amount; 0 if there is none."""
        missing = self._missing(dict(zip(self._by, key, strict=True)).get("kind"))
        return _Amount(self._bytes[key], self._numbers[key], missing)

    def _missing(self, kind: Value) -> str | None:
        """
        Return why an amount may be more than was found.

        :param kind: its kind; ``None`` for all kinds
        """
        wanted = {"slabs": "slab", "sites": SITES}.get(self._part, kind)
        for missing, why in self._snapshot.missing.items():
            if wanted == missing or (wanted is None and missing != SITES):
                return f"{why} ({self._name})"
        return None


def _path(snapshot: ChargeSnapshot, memcg: int | None) -> str | None:
    return None if memcg is None else snapshot.memcgs[memcg].path


def _table(snapshots: Sequence[Named], by: Sequence[str], times: Sequence[int] | None) -> Table:
    parts = [_Part(some, by) for some in snapshots]
    keys = dict.fromkeys(key for part in parts for key in part)
    title = f"{_TITLES[_part_of(by)]} by {named(by)}"
    omit = [name for name in DIMENSIONS if name not in by]
    found: list[GrowthRow] | list[TrendRow]
    if len(snapshots) == 2:
        hours = None if times is None else times[1] / _HOUR
        grown = (_growth(by, key, parts[0].at(key), parts[1].at(key), hours) for key in keys)
        found = sorted((row for row in grown if row.growth or row.number_growth), key=_most)
        columns, what = columns_of(GrowthRow, omit=omit), "growth"
    else:
        trends = (_trend(by, key, [part.at(key) for part in parts], times) for key in keys)
        found = sorted((row for row in trends if row is not None), key=_certain)
        columns, what = columns_of(TrendRow, omit=omit), "trend"
    return Table(
        "_".join((what, *by)),
        f"{what} of {title}",
        columns,
        found,
        empty="nothing grew or shrank",
        is_ranked=True,
    )


def _growth(
    by: Sequence[str], key: _Key, before: _Amount, after: _Amount, hours: float | None
) -> GrowthRow:
    growth: Value = after.bytes - before.bytes
    number: Value = after.number - before.number
    rate: Value = round((after.bytes - before.bytes) / hours) if hours else None
    missing = before.missing or after.missing
    if missing is not None:
        growth = number = rate = NotRead(missing)
    places = {**dict.fromkeys(DIMENSIONS), **dict(zip(by, key, strict=True))}
    return GrowthRow(
        **places,  # type: ignore[arg-type]
        before=_size(before),
        after=_size(after),
        growth=growth,
        number_growth=number,
        per_hour=rate,
    )


def _size(amount: _Amount) -> Value:
    """Return the bytes that were found; unknown if none was, and some may be missing."""
    return NotRead(amount.missing) if amount.missing and not amount.bytes else amount.bytes


def _trend(
    by: Sequence[str], key: _Key, amounts: Sequence[_Amount], times: Sequence[int] | None
) -> TrendRow | None:
    """Return the trend of an amount; ``None`` if it did not change, or is known once only."""
    # Without times, the windows are of the same length.
    at = times or list(range(len(amounts)))
    known = [(t, a.bytes) for t, a in zip(at, amounts, strict=True) if a.missing is None]
    values = [size for _, size in known]
    if len(set(values)) < 2:
        return None
    trend = trend_of([time for time, _ in known], values)

    def rate(slope: float | None) -> Value:
        return None if slope is None or times is None else round(slope * _HOUR)

    places = {**dict.fromkeys(DIMENSIONS), **dict(zip(by, key, strict=True))}
    return TrendRow(
        **places,  # type: ignore[arg-type]
        first=_size(amounts[0]),
        last=_size(amounts[-1]),
        per_hour=rate(trend.slope),
        low=rate(trend.low),
        high=rate(trend.high),
        grew=trend.grew,
        windows=trend.windows,
        grows=trend.grows,
    )


def _most(row: GrowthRow) -> tuple[object, ...]:
    """Order rows by growth, the largest first, and what is not known last."""
    size = -row.growth if isinstance(row.growth, int) else 0
    return not isinstance(row.growth, int), size, *_places(row)


def _certain(row: TrendRow) -> tuple[object, ...]:
    """Order rows: those that certainly grow first, by their slope."""
    first = row.first if isinstance(row.first, int) else 0
    last = row.last if isinstance(row.last, int) else 0
    slope = row.per_hour if isinstance(row.per_hour, int) else last - first
    return not row.grows, -slope, *_places(row)


def _places(row: _Places) -> tuple[str, ...]:
    return tuple(str(getattr(row, name)) for name in DIMENSIONS)


def _memcgs(first: ChargeSnapshot, last: ChargeSnapshot) -> Table:
    """Return the memcgs that are new, and those that are gone."""
    before, after = ({m.path for m in s.memcgs if m.state == "online"} for s in (first, last))
    rows = [
        MemcgRow(path, change, size)
        for snapshot, other, paths, change in (
            (last, first, after - before, "new"),
            (first, last, before - after, "gone"),
        )
        # One that could not be read is not gone.
        if _MEMCGS.isdisjoint(other.unread)
        for path, size in _charged(snapshot, paths).items()
    ]
    rows.sort(key=lambda row: (row.change, -row.bytes, row.memcg))
    columns, none = columns_of(MemcgRow), "no memcg is new or gone"
    return Table("memcgs", "memcgs that are new or gone", columns, rows, empty=none, is_ranked=True)


def _charged(snapshot: ChargeSnapshot, paths: set[str]) -> dict[str, int]:
    found = dict.fromkeys(sorted(paths), 0)
    for charge in snapshot.charges:
        path = _path(snapshot, charge.memcg)
        if path in found:
            found[path] += charge.bytes
    return found


def _row_of(some: Named) -> SnapshotRow:
    snapshot, time = some.snapshot, some.snapshot.time
    return SnapshotRow(
        snapshot=some.name,
        host=snapshot.image.host,
        release=snapshot.image.release,
        time=None if time is None else strftime(_DATE, gmtime(time.realtime // _SECOND)),
        memcgs=len(snapshot.memcgs),
        dying=sum(memcg.state == "dying" for memcg in snapshot.memcgs),
        bytes=sum(charge.bytes for charge in snapshot.charges),
        whole=snapshot.is_whole,
    )


def _notes(snapshots: Sequence[Named], times: Sequence[int] | None) -> Iterator[str]:
    yield "Rows that did not change are left out, also of the totals."
    clocks = [some.snapshot.time for some in snapshots if some.snapshot.time is not None]
    if times is not None:
        seconds = round(times[-1] / _SECOND)
        yield f"From the first snapshot to the last: {counted(seconds, 'seconds')}."
    elif len(clocks) < len(snapshots):
        yield "The time of a snapshot is not known: there are no rates."
    elif len(set(clocks)) < len(clocks):
        yield "Two snapshots are of the same time: there are no rates."
    else:
        yield "The second snapshot is older than the first: there are no rates."
    first = snapshots[0].snapshot
    yield from conservation_notes(first, snapshots[-1].snapshot)
    if len({some.snapshot.image.host for some in snapshots}) > 1:
        yield "They are of several machines."
    elif any(not is_same_boot(first, some.snapshot) for some in snapshots[1:] if clocks):
        yield "The machine was booted in between."
    if len({some.snapshot.image.release for some in snapshots}) > 1:
        yield "They are of several kernels: caches and lines of code may have other names."
    for name, snapshot in snapshots:
        if not snapshot.is_whole:
            subjects = ", ".join(f"{n:,} of {subject}" for subject, n in snapshot.unread.items())
            yield f"{name} is not whole; not read: {subjects}."
    if len(snapshots) == 2 and all(some.snapshot.sites is None for some in snapshots):
        yield "Neither kernel profiles allocations: there are no call sites."


def _files(text: str) -> str:
    if not text:
        raise ArgumentTypeError("a file has no name")
    return text


DIFF = View(
    name="diff",
    description="Shows what grew between snapshots, in bytes and in bytes per hour, by memcg, "
    "node, kind, slab cache and line of code. Of more than two snapshots it shows trends, which "
    "tell a leak from what comes and goes. Each may be a file that memcg-inspect snapshot has "
    "made, or a vmcore.",
    run=lambda image, args: compared(args.compared, args.by),
    records=(GrowthRow, TrendRow, MemcgRow, ConservationRow, SnapshotRow),
    arguments=(
        Argument(
            ("snapshots",),
            {
                "nargs": "+",
                "metavar": "SNAPSHOT",
                "type": _files,
                "help": "the first one, and later ones in the order of their times",
            },
        ),
        by_argument(DIMENSIONS),
    ),
    choices=("memcg", "node", "sort", "fields", "top"),
    incomplete="not everything could be read",
    compares=False,
)

WATCH = replace(
    DIFF,
    name="watch",
    description="Takes snapshots of a running kernel or a guest, one after the other, and prints "
    "a line about each. In the end (--count, or Ctrl-C) it prints what grows, as diff does for "
    "these snapshots. The pause after each is at least nine times as long as its CPU time.",
    arguments=DIFF.arguments[1:],
)
