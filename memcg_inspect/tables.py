# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tables
------

What a view answers with: columns that are declared once, with their unit, and rows. Choosing
rows and columns is done here, and not by each view.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from memcg_inspect.model import NUMA_NO_NODE, Coverage, ImageInfo, MemcgInspectError, counted

__all__ = (
    "AMOUNTS",
    "Answer",
    "Choice",
    "Column",
    "Kind",
    "NotRead",
    "Table",
    "UsageError",
    "Value",
    "as_path",
    "check_fields",
    "choose",
    "matches",
)

#: What a column holds. ``bytes``, ``pages``, ``KiB`` and ``count`` are amounts; ``number`` is
#: no amount (a CPU, an index); ``memcg`` is a path, and the column ``memcg_address`` beside it
#: tells removed memcgs of one path apart.
Kind = Literal[
    "text", "memcg", "node", "address", "number", "bytes", "pages", "KiB", "count", "share", "flag"
]

AMOUNTS: frozenset[Kind] = frozenset({"bytes", "pages", "KiB", "count", "share"})


_NO_NAME = "''"


class UsageError(MemcgInspectError):
    """The user asked for something that is not there."""


@dataclass(frozen=True)
class NotRead:
    """In place of a value that could not be read."""

    reason: str


#: ``None`` where a column does not apply to a row.
Value = int | float | str | NotRead | None


@dataclass(frozen=True)
class Column:
    """
    One column.

    :ivar name: heading, field in JSON, and what ``--fields`` and ``--sort`` take
    :ivar shown: whether it is shown if nobody says which are wanted
    :ivar total: whether its sum over the rows means something
    """

    name: str
    kind: Kind
    help: str
    shown: bool = True
    total: bool = False


@dataclass(frozen=True)
class Table:
    """
    Rows of values, one for each column.

    :ivar name: for JSON
    :ivar title: for people
    :ivar totals: sums of the columns that have one, over all chosen rows
    :ivar empty: what to say if there are no rows
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Value, ...]]
    totals: Mapping[str, Value] | None = None
    empty: str = "nothing found"

    def index(self, name: str) -> int:
        """
        Return the position of a column.

        :raises UsageError: if there is none of that name
        """
        for i, column in enumerate(self.columns):
            if column.name == name:
                return i
        # Columns of several tables may have one name.
        names = ", ".join(dict.fromkeys(column.name for column in self.columns))
        raise UsageError(f"there is no field {name or _NO_NAME}; there are: {names}")

    def has(self, name: str) -> bool:
        """Return whether there is a column of a name."""
        return any(column.name == name for column in self.columns)


@dataclass(frozen=True)
class Answer:
    """
    What a view says.

    :ivar tables: choosing of fields and order concerns the first that has them
    :ivar text: to be printed as it is, in place of tables
    :ivar interrupted: whether it was cut short
    :ivar unanswered: whether some of several questions has no answer; a note says why
    """

    command: str
    image: ImageInfo
    tables: tuple[Table, ...]
    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    text: str | None = None
    interrupted: bool = False
    unanswered: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether everything that should have been read was."""
        if self.interrupted or self.unanswered:
            return False
        return not any(c.unreadable for c in self.coverage.values())


class Choice(NamedTuple):
    """
    Which rows and columns are wanted.

    :ivar memcg: a path, a pattern of the shell for paths, or an address; rows of others go
    :ivar node: rows that have nothing on it go
    :ivar sort: a field; amounts largest first, whatever their signs, others in order; ``:asc``
        or ``:desc`` behind it says otherwise, and minds signs
    :ivar fields: in this order; ``all`` for all of them
    """

    memcg: str | None = None
    node: int | None = None
    sort: str | None = None
    fields: Sequence[str] | None = None

    @property
    def whose(self) -> str:
        """Which rows are wanted, in words."""
        memcg = "" if self.memcg is None else f"memcg {self.memcg}"
        node = "" if self.node is None else f"node {self.node}"
        return " on ".join(filter(None, (memcg, node)))


def check_fields(columns: Sequence[Column], choice: Choice) -> None:
    """
    Refuse fields that no table of a view has, and orders that there are none of.

    :param columns: of the view; those of nodes are not known before it has run
    :raises UsageError: if there is no such field
    """
    table = Table("", "", tuple(columns), ())
    for name in (*(choice.fields or ()), *(() if choice.sort is None else [choice.sort])):
        name = name.partition(":")[0]
        if name != "all" and not name.startswith("node_"):
            table.index(name)  # raises
    if choice.sort is not None:
        _direction(choice.sort)


def choose(answer: Answer, choice: Choice) -> Answer:
    """
    Choose rows and columns of all tables of an answer.

    :raises UsageError: if no table has such a field
    """
    for name in (*(choice.fields or ()), *([choice.sort] if choice.sort else ())):
        name = name.partition(":")[0]
        if name != "all" and not any(table.has(name) for table in answer.tables):
            answer.tables[0].index(name)  # raises
    fields = choice.fields
    tables = [t for t in answer.tables if not fields or _has_any(t, fields)]
    return replace(
        answer,
        tables=tuple(_choose(table, choice) for table in tables),
        notes=answer.notes + tuple(_not_chosen(tables, choice)),
    )


def _not_chosen(tables: Sequence[Table], choice: Choice) -> Iterator[str]:
    """What a choice of rows has no say in, and what it leaves out unasked."""
    tables = [table for table in tables if table.rows]
    if choice.memcg is not None:
        whole = [table.title for table in tables if not table.has("memcg")]
        yield from _whole(whole, "of the whole machine", "--memcg")
    if choice.node is None:
        return
    part = f"node_{choice.node}"
    whole = [table.title for table in tables if not (table.has("node") or table.has(part))]
    yield from _whole(whole, "of all nodes", "--node")
    nowhere = 0
    for table in tables:
        if table.has("node"):
            rows = _of(table, table.rows, choice.memcg)
            nowhere += sum(_is_nowhere(row[table.index("node")]) for row in rows)
    if nowhere:
        is_one = nowhere == 1
        yield (
            f"{counted(nowhere, 'rows')} that {'belongs' if is_one else 'belong'} to no node "
            f"{'is' if is_one else 'are'} left out."
        )


def _whole(titles: Sequence[str], what: str, option: str) -> Iterator[str]:
    if titles:
        verb, them = ("is", "it") if len(titles) == 1 else ("are", "them")
        named = " and ".join(f'"{title}"' for title in titles)
        yield f"{named} {verb} {what}: {option} does not choose from {them}."


def _is_nowhere(node: Value) -> bool:
    return not isinstance(node, int) or node == NUMA_NO_NODE


def _has_any(table: Table, fields: Sequence[str]) -> bool:
    return list(fields) == ["all"] or any(map(table.has, fields))


def _choose(table: Table, choice: Choice) -> Table:
    rows = _of(table, table.rows, choice.memcg)
    if choice.node is not None:
        rows = [row for row in rows if _is_on(table, row, choice.node)]
    if choice.sort is not None and table.has(choice.sort.partition(":")[0]):
        rows = _sorted(table, rows, choice.sort)
    totals = _totals(table, rows)
    columns = _columns(table, choice.fields)
    at_columns = [table.index(column.name) for column in columns]
    return replace(
        table,
        columns=columns,
        rows=[tuple(row[i] for i in at_columns) for row in rows],
        totals=totals,
        # What is said where there are no rows at all would be wrong where others have some.
        empty=f"nothing of {choice.whose}" if table.rows and not rows else table.empty,
    )


def as_path(wanted: str) -> str:
    """
    Return what names a memcg, with its path as the kernel has it: ``web/`` is ``/web``.

    :param wanted: a path, a pattern of the shell for paths, or an address
    """
    if not wanted or wanted.lower().startswith("0x"):
        return wanted
    # A pattern may begin with what stands for the slash.
    path = wanted if wanted[0] in "*?[" else f"/{wanted}"
    return re.sub("/+", "/", path).rstrip("/") or "/"


def matches(wanted: str, path: object, address: object) -> bool:
    """
    Return whether a memcg is one that is wanted.

    :param wanted: a path, a pattern of the shell for paths, or an address
    :param path: of the memcg
    :param address: ``struct mem_cgroup *``
    """
    if path == wanted:
        return True
    if wanted.lower().startswith("0x"):
        return isinstance(address, int) and f"{address:#x}" == wanted.lower()
    return isinstance(path, str) and fnmatchcase(path, wanted)


def _of(
    table: Table, rows: Sequence[tuple[Value, ...]], memcg: str | None
) -> list[tuple[Value, ...]]:
    """Rows of a memcg; all if none is wanted, or the table has no such column."""
    if memcg is None or not table.has("memcg"):
        return list(rows)
    return [row for row in rows if _is_of(table, row, memcg)]


def _is_of(table: Table, row: tuple[Value, ...], wanted: str) -> bool:
    address = row[table.index("memcg_address")] if table.has("memcg_address") else None
    return matches(wanted, row[table.index("memcg")], address)


def _is_on(table: Table, row: tuple[Value, ...], nid: int) -> bool:
    """Whether a row is of a node, or has a part on it."""
    if table.has("node"):
        return row[table.index("node")] == nid
    part = f"node_{nid}"
    return not table.has(part) or row[table.index(part)] not in (0, None)


def _sorted(table: Table, rows: list[tuple[Value, ...]], wanted: str) -> list[tuple[Value, ...]]:
    way = _direction(wanted)
    at = table.index(wanted.partition(":")[0])
    down = way == "desc" or (not way and table.columns[at].kind in AMOUNTS)
    # What has no value comes last, either way.
    known = [row for row in rows if isinstance(row[at], (int, float, str))]
    other = [row for row in rows if not isinstance(row[at], (int, float, str))]

    def size(row: tuple[Value, ...]) -> Value:
        value = row[at]
        # Errors and differences are large whichever way they go.
        return abs(value) if not way and isinstance(value, (int, float)) and down else value

    return sorted(known, key=size, reverse=down) + other  # type: ignore[arg-type]


def _direction(wanted: str) -> str:
    way = wanted.partition(":")[2]
    if way not in ("", "asc", "desc"):
        raise UsageError(f"{wanted}: rows are sorted :asc or :desc")
    return way


def _totals(table: Table, rows: Sequence[tuple[Value, ...]]) -> dict[str, Value] | None:
    totals: dict[str, Value] = {}
    for i, column in enumerate(table.columns):
        if not column.total:
            continue
        values = [row[i] for row in rows]
        if rows and all(value is None for value in values):
            totals[column.name] = None  # it applies to none of them
            continue
        missing = next((v for v in values if isinstance(v, NotRead)), None)
        totals[column.name] = missing or sum(v for v in values if isinstance(v, (int, float)))
    return totals or None


def _columns(table: Table, fields: Sequence[str] | None) -> tuple[Column, ...]:
    if fields is None:
        return tuple(column for column in table.columns if column.shown)
    if list(fields) == ["all"]:
        return table.columns
    return tuple(table.columns[table.index(name)] for name in fields if table.has(name))
