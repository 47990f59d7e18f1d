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
from time import gmtime, strftime
from typing import Annotated, NamedTuple

from memcg_inspect.model import counted
from memcg_inspect.model_snapshot import (
    ChargeSnapshot,
    ImageTime,
    SavedCharge,
    SavedSite,
    SavedSlab,
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

_HOUR = 60 * 60
#: Two boots of a machine are further apart, in seconds. Clocks may be set meanwhile.
_SAME_BOOT = 60


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
    times = _times(snapshots)
    tables = [
        _table(snapshots, wanted, times)
        for wanted in ([_checked(by)] if by else _DEFAULT)
        if by or not _lacks_sites(snapshots, wanted)
    ]
    tables.append(_memcgs(snapshots[0].snapshot, snapshots[-1].snapshot))
    rows = [_row_of(some) for some in snapshots]
    tables.append(Table("snapshots", "what is compared", columns_of(SnapshotRow), rows))
    if by and _lacks_sites(snapshots, _checked(by)):
        raise UsageError("--by site: not all of these kernels profile allocations")
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


def _times(snapshots: Sequence[Named]) -> list[float] | None:
    """
    Return the times of snapshots in seconds after the first one.

    :return: ``None`` if they are not known, or not in ascending order
    """
    known = [some.snapshot.time for some in snapshots]
    clocks = [time for time in known if time is not None]
    if len(clocks) != len(known):
        return None
    of_one_boot = all(_is_same_boot(clocks[0], time) for time in clocks)
    seconds = [time.uptime if of_one_boot else time.realtime for time in clocks]
    if any(after <= before for before, after in zip(seconds, seconds[1:], strict=False)):
        return None
    return [float(time - seconds[0]) for time in seconds]


def _is_same_boot(one: ImageTime, other: ImageTime) -> bool:
    return abs((one.realtime - one.uptime) - (other.realtime - other.uptime)) < _SAME_BOOT


class _Amount(NamedTuple):
    bytes: int
    number: int


def _amounts(snapshot: ChargeSnapshot, by: Sequence[str]) -> dict[_Key, _Amount]:
    """Return the sums of a part of a snapshot, by what rows are told apart by."""
    rows: Iterable[_Saved] = getattr(snapshot, _part_of(by)) or ()
    bytes_: Counter[_Key] = Counter()
    numbers: Counter[_Key] = Counter()
    for row in rows:
        key = tuple(
            _path(snapshot, row.memcg) if name == "memcg" else getattr(row, name) for name in by
        )
        bytes_[key] += row.bytes
        numbers[key] += row.number
    return {key: _Amount(size, numbers[key]) for key, size in bytes_.items()}


def _path(snapshot: ChargeSnapshot, memcg: int | None) -> str | None:
    return None if memcg is None else snapshot.memcgs[memcg].path


def _table(snapshots: Sequence[Named], by: Sequence[str], times: Sequence[float] | None) -> Table:
    amounts = [_amounts(some.snapshot, by) for some in snapshots]
    keys = dict.fromkeys(key for found in amounts for key in found)
    none = [
        0 if s.is_whole else NotRead(f"not found in {name}, which is not whole")
        for name, s in snapshots
    ]
    title = f"{_TITLES[_part_of(by)]} by {named(by)}"
    omit = [name for name in DIMENSIONS if name not in by]
    name = "_".join(("growth", *by)) if len(snapshots) == 2 else "_".join(("trend", *by))
    if len(snapshots) == 2:
        hours = None if times is None else times[1] / _HOUR
        grown = [_growth(by, key, amounts, none, hours) for key in keys]
        rows = sorted((row for row in grown if row.growth or row.number_growth), key=_most)
        columns = columns_of(GrowthRow, omit=omit)
        return Table(name, f"growth of {title}", columns, rows, empty=_SAME, is_ranked=True)
    trends = [_trend(by, key, amounts, none, times) for key in keys]
    found = sorted((row for row in trends if row is not None), key=_certain)
    columns = columns_of(TrendRow, omit=omit)
    return Table(name, f"trend of {title}", columns, found, empty=_SAME, is_ranked=True)


_SAME = "nothing grew or shrank"


def _growth(
    by: Sequence[str],
    key: _Key,
    amounts: Sequence[dict[_Key, _Amount]],
    none: Sequence[Value],
    hours: float | None,
) -> GrowthRow:
    before, after = (found.get(key) for found in amounts)
    sizes = [
        some.bytes if some is not None else value
        for some, value in zip((before, after), none, strict=True)
    ]
    unread = next((size for size in sizes if isinstance(size, NotRead)), None)
    growth: Value = unread
    number: Value = unread
    if unread is None:
        growth = (after.bytes if after else 0) - (before.bytes if before else 0)
        number = (after.number if after else 0) - (before.number if before else 0)
    rate = round(growth / hours) if isinstance(growth, int) and hours else unread
    places = {**dict.fromkeys(DIMENSIONS), **dict(zip(by, key, strict=True))}
    return GrowthRow(
        **places,  # type: ignore[arg-type]
        before=sizes[0],
        after=sizes[1],
        growth=growth,
        number_growth=number,
        per_hour=rate,
    )


def _trend(
    by: Sequence[str],
    key: _Key,
    amounts: Sequence[dict[_Key, _Amount]],
    none: Sequence[Value],
    times: Sequence[float] | None,
) -> TrendRow | None:
    """Return the trend of an amount; ``None`` if it did not change, or was read once only."""
    sizes: list[Value] = [
        found[key].bytes if key in found else value
        for found, value in zip(amounts, none, strict=True)
    ]
    # Without times, the windows are of the same length.
    at = times or [float(number) for number in range(len(sizes))]
    known = [(time, size) for time, size in zip(at, sizes, strict=True) if isinstance(size, int)]
    values = [size for _, size in known]
    if len(set(values)) < 2:
        return None
    trend = trend_of([time for time, _ in known], values)

    def rate(slope: float | None) -> Value:
        return None if slope is None or times is None else round(slope * _HOUR)

    places = {**dict.fromkeys(DIMENSIONS), **dict(zip(by, key, strict=True))}
    return TrendRow(
        **places,  # type: ignore[arg-type]
        first=sizes[0],
        last=sizes[-1],
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
        for snapshot, paths, change in (
            (last, after - before, "new"),
            (first, before - after, "gone"),
        )
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
        time=None if time is None else strftime("%Y-%m-%d %H:%M:%S", gmtime(time.realtime)),
        memcgs=len(snapshot.memcgs),
        dying=sum(memcg.state == "dying" for memcg in snapshot.memcgs),
        bytes=sum(charge.bytes for charge in snapshot.charges),
        whole=snapshot.is_whole,
    )


def _notes(snapshots: Sequence[Named], times: Sequence[float] | None) -> Iterator[str]:
    if times is None:
        if all(some.snapshot.time is not None for some in snapshots):
            yield "The snapshots are not in the order of their times: there are no rates."
        else:
            yield "The time of a snapshot is not known: there are no rates."
    else:
        yield f"From the first snapshot to the last: {counted(round(times[-1]), 'seconds')}."
    clocks = [some.snapshot.time for some in snapshots if some.snapshot.time is not None]
    if any(not _is_same_boot(clocks[0], clock) for clock in clocks[1:]):
        yield "The machine was booted in between, or they are of several machines."
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
    records=(GrowthRow, TrendRow, MemcgRow, SnapshotRow),
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
    "these snapshots. The pause after each is at least nine times as long as it took.",
    arguments=DIFF.arguments[1:],
)
