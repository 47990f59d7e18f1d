# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tables
------

The result of a command is a set of tables. The rows of a table are records: frozen dataclasses
with a :class:`Field` for each column, which states its type, unit and meaning. :func:`columns_of`
makes columns from these fields. :func:`choose` applies ``--memcg``, ``--node``, ``--sort`` and
``--fields``, for all commands, and :func:`largest` leaves the first rows for text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from memcg_inspect.escape import printable
from memcg_inspect.model import (
    NUMA_NO_NODE,
    Coverage,
    ImageInfo,
    Memcg,
    MemcgInspectError,
    counted,
)

__all__ = (
    "AMOUNTS",
    "CHOSEN",
    "SCHEMA",
    "Answer",
    "Choice",
    "Column",
    "ColumnType",
    "Field",
    "MemcgAddress",
    "NotRead",
    "Rest",
    "Table",
    "UsageError",
    "Value",
    "above",
    "as_path",
    "check_fields",
    "choose",
    "chosen_rows",
    "columns_of",
    "largest",
    "matches",
    "with_subtrees",
)

#: Type of a column. ``bytes``, ``pages``, ``KiB``, ``count`` and ``difference`` are amounts
#: (``difference`` is shown with its sign). ``number`` is not an amount (a CPU, an index).
#: ``memcg`` is a path. The column ``memcg_address`` beside it distinguishes removed memcgs that
#: had the same path.
ColumnType = Literal[
    "text",
    "memcg",
    "node",
    "address",
    "number",
    "bytes",
    "pages",
    "KiB",
    "count",
    "difference",
    "share",
    "flag",
]

AMOUNTS: frozenset[ColumnType] = frozenset(
    {"bytes", "pages", "KiB", "count", "difference", "share"}
)

_NO_NAME = "''"

#: Number of the format of JSON documents.
SCHEMA = 1


class UsageError(MemcgInspectError):
    """The user asked for something that does not exist."""


@dataclass(frozen=True)
class NotRead:
    """
    A value that could not be read.

    :ivar reason: why it could not be read
    """

    reason: str


#: ``None`` where a column does not apply to a row.
Value = int | float | str | NotRead | None


class Field(NamedTuple):
    """
    Describes the column of a field of a record: ``Annotated[int, Field(...)]``.

    :ivar type: type of its column
    :ivar help: what it means
    :ivar shown: whether it is shown without ``--fields``
    :ivar total: whether its sum over the rows is meaningful
    :ivar each: for a field that is a mapping with a column for each key: name of the column, with
        ``{}`` in place of the key. ``help`` may contain ``{}``, too.
    :ivar priority: a table that does not fit on the terminal leaves out the columns with the least
        of it first
    :ivar in_bytes: whether a difference is in bytes
    :ivar shares: whether a terminal shows how much of the total each row has
    """

    type: ColumnType
    help: str
    shown: bool = True
    total: bool = False
    each: str | None = None
    priority: int = 5
    in_bytes: bool = False
    shares: bool = False


#: The priority of columns that the user has chosen, which are never left out.
CHOSEN = 10
#: The field that distinguishes memcgs with the same path.
MemcgAddress = Annotated[int | None, Field("address", "struct mem_cgroup *", shown=False)]


@dataclass(frozen=True)
class Column:
    """
    One column.

    :ivar name: heading, name in JSON, and argument of ``--fields`` and ``--sort``
    :ivar type: type of its values
    :ivar help: meaning of the column
    :ivar shown: whether it is shown without ``--fields``
    :ivar total: whether its sum over the rows is meaningful
    :ivar field: attribute of the records; :attr:`name` if empty
    :ivar key: key in that attribute, if the attribute is a mapping
    :ivar priority: see :class:`Field`; :data:`CHOSEN` for columns that are never left out
    :ivar in_bytes: whether a difference is in bytes
    :ivar shares: whether a terminal shows how much of the total each row has
    """

    name: str
    type: ColumnType
    help: str
    shown: bool = True
    total: bool = False
    field: str = ""
    key: int | str | None = None
    priority: int = 5
    in_bytes: bool = False
    shares: bool = False

    def value(self, record: object) -> Value:
        """Return the value of this column in a row."""
        value = getattr(record, self.field or self.name)
        return value if self.key is None else value[self.key]  # type: ignore[no-any-return]


@cache
def _fields(record: type) -> tuple[tuple[str, Field], ...]:
    hints = get_type_hints(record, include_extras=True)
    return tuple(
        (name, declared)
        for name, hint in hints.items()
        for declared in getattr(hint, "__metadata__", ())
        if isinstance(declared, Field)
    )


def columns_of(
    record: type,
    keys: Iterable[int | str] = (),
    only: Collection[str] | None = None,
    omit: Collection[str] = (),
) -> tuple[Column, ...]:
    """
    Return the columns of the records of a class, in the order of its fields.

    :param keys: keys of its field that is a mapping, if it has one; each is a column
    :param only: names of the fields wanted; ``None`` for all
    :param omit: names of fields that are not wanted
    """
    columns: list[Column] = []
    for name, declared in _fields(record):
        if name in omit or (only is not None and name not in only):
            continue
        column = Column(
            name,
            declared.type,
            declared.help,
            declared.shown,
            declared.total,
            priority=declared.priority,
            in_bytes=declared.in_bytes,
            shares=declared.shares,
        )
        if declared.each is None:
            columns.append(column)
            continue
        for key in keys:
            called, help = declared.each.format(key), declared.help.format(key)
            columns.append(replace(column, name=called, help=help, field=name, key=key))
    return tuple(columns)


class Rest(NamedTuple):
    """
    The rows that a table does not list.

    :ivar rows: how many there are
    :ivar totals: their sums, by name of the column, for columns that have a sum
    """

    rows: int
    totals: Mapping[str, Value]


@dataclass(frozen=True)
class Table:
    """
    Rows and columns.

    :ivar name: name in JSON
    :ivar title: title in text
    :ivar columns: columns, in order; each returns its value of a row
    :ivar rows: records, all of one class
    :ivar totals: sums over all chosen rows, by name of the column, for columns that have a sum
    :ivar empty: text to show if there are no rows
    :ivar is_ranked: whether the first rows matter most, so that text may leave out the others
    :ivar rest: the rows that were left out
    :ivar parents: if each row includes the memcgs below its own: the memcg above each memcg, by
        address. Sums count each memcg once.
    :ivar contents: what is added up, if options of the command change that and not the columns.
        Only tables with the same contents can be compared.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Any]
    totals: Mapping[str, Value] | None = None
    empty: str = "nothing found"
    is_ranked: bool = False
    rest: Rest | None = None
    parents: Mapping[int, int | None] | None = None
    contents: str | None = None

    def column(self, name: str) -> Column:
        """
        Return the column with this name.

        :raises UsageError: if there is none
        """
        for column in self.columns:
            if column.name == name:
                return column
        # Columns of several tables may have one name.
        names = ", ".join(dict.fromkeys(column.name for column in self.columns))
        raise UsageError(f"there is no field {name or _NO_NAME}; there are: {names}")

    def has(self, name: str) -> bool:
        """Return whether there is a column with this name."""
        return any(column.name == name for column in self.columns)

    def values(self, row: object) -> dict[str, Value]:
        """Return the values of a row, by name of the column."""
        return {column.name: column.value(row) for column in self.columns}


class Choice(NamedTuple):
    """
    Which rows and columns the user wants.

    :ivar memcgs: paths, shell patterns for paths, or addresses; rows of other memcgs are left out
    :ivar nodes: rows that have nothing on any of these nodes are left out
    :ivar sort: name of a field. Amounts are sorted by absolute value, largest first, and other
        values in ascending order. ``:asc`` or ``:desc`` after the name sorts by signed value, in
        that order.
    :ivar fields: names of columns, in this order; ``all`` for all of them
    :ivar subtree: whether the memcgs below *memcgs* are wanted, too
    :ivar below: the memcgs below them, ``struct mem_cgroup *``: see :func:`with_subtrees`
    """

    memcgs: Sequence[str] = ()
    nodes: Sequence[int] = ()
    sort: str | None = None
    fields: Sequence[str] | None = None
    subtree: bool = False
    below: frozenset[int] = frozenset()

    @property
    def description(self) -> str:
        """Description of the rows that are wanted."""
        memcg = f"memcg {' or '.join(self.memcgs)}" if self.memcgs else ""
        if self.subtree:
            memcg += " or below"
        node = f"node {' or '.join(map(str, self.nodes))}" if self.nodes else ""
        return " on ".join(filter(None, (memcg, node)))

    def has(self, path: object, address: object) -> bool:
        """
        Return whether rows of a memcg are wanted.

        :param path: path of the memcg
        :param address: ``struct mem_cgroup *``
        """
        if not self.memcgs or address in self.below:
            return True
        paths = [path]
        if self.subtree and address is None and isinstance(path, str):
            # It is gone, so that its path alone tells what it was below.
            paths += above(path)
        return any(matches(wanted, some, address) for wanted in self.memcgs for some in paths)


@dataclass(frozen=True)
class Answer:
    """
    The result of a view.

    :ivar command: name of the command
    :ivar image: the image that was read; ``None`` if there is not one
    :ivar tables: the tables; ``--fields`` and ``--sort`` apply to those that have such columns
    :ivar coverage: how much could be read, by subject
    :ivar notes: sentences that help to read the tables
    :ivar text: text that is printed instead of the tables
    :ivar interrupted: whether the user interrupted it
    :ivar unanswered: whether one of several questions has no answer; a note says why
    :ivar chosen: the rows that it has
    """

    command: str
    image: ImageInfo | None
    tables: tuple[Table, ...]
    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    text: str | None = None
    interrupted: bool = False
    unanswered: bool = False
    chosen: Choice = Choice()

    def __repr__(self) -> str:
        tables = ", ".join(f"{table.name}: {len(table.rows)} rows" for table in self.tables[:10])
        more = f", {len(self.tables) - 10} more tables" if len(self.tables) > 10 else ""
        state = "whole" if self.is_whole else "not whole"
        return f"<Answer of {self.command[:40]}: {tables[:600]}{more}; {state}>"

    @property
    def is_whole(self) -> bool:
        """Whether everything that should have been read was read."""
        if self.interrupted or self.unanswered:
            return False
        return not any(c.unreadable for c in self.coverage.values())


def above(path: str) -> Iterator[str]:
    """Return the paths of the memcgs above one."""
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path


def with_subtrees(choice: Choice, memcgs: Iterable[Memcg]) -> Choice:
    """
    Return a choice that knows the memcgs below those that are wanted, if they are wanted, too.

    :param memcgs: all memcgs, parents before their children
    """
    if not choice.subtree:
        return choice
    found: set[int] = set()
    for memcg in memcgs:
        if memcg.parent in found or choice.has(memcg.path, memcg.address):
            found.add(memcg.address)
    return choice._replace(below=frozenset(found))


def check_fields(columns: Sequence[Column], choice: Choice) -> None:
    """
    Check the names of fields before the command runs, since it may run for long.

    :param columns: columns of all tables of the command. Columns of nodes (``node_0``) are not
        known yet.
    :raises UsageError: if there is no such field, or no such order
    """
    table = Table("", "", tuple(columns), ())
    for name in (*(choice.fields or ()), *(() if choice.sort is None else [choice.sort])):
        name = name.partition(":")[0]
        if name != "all" and not name.startswith("node_"):
            table.column(name)  # raises
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
            answer.tables[0].column(name)  # raises
    fields = choice.fields
    tables = [t for t in answer.tables if not fields or _has_any(t, fields)]
    return replace(
        answer,
        tables=tuple(_choose(table, choice) for table in tables),
        notes=answer.notes + tuple(_not_chosen(tables, choice)),
        chosen=choice,
    )


def largest(answer: Answer, most: int) -> Answer:
    """
    Leave the first rows of tables that are ranked, and sum up the others.

    :param most: how many rows; 0 for all
    """
    return replace(answer, tables=tuple(_largest(table, most) for table in answer.tables))


def _largest(table: Table, most: int) -> Table:
    if not table.is_ranked or not 0 < most < len(table.rows):
        return table
    others = table.rows[most:]
    rest = Rest(len(others), _totals(table, others) or {})
    return replace(table, rows=table.rows[:most], rest=rest)


def _not_chosen(tables: Sequence[Table], choice: Choice) -> Iterator[str]:
    """Return notes on tables to which a choice does not apply, and on rows that it leaves out."""
    tables = [table for table in tables if table.rows]
    if choice.memcgs:
        whole = [table.title for table in tables if not table.has("memcg")]
        yield from _whole(whole, "the whole machine", "--memcg")
    if not choice.nodes:
        return
    parts = [f"node_{nid}" for nid in choice.nodes]
    whole = [
        table.title for table in tables if not (table.has("node") or any(map(table.has, parts)))
    ]
    yield from _whole(whole, "all nodes", "--node")
    nowhere = 0
    for table in tables:
        if table.has("node"):
            node = table.column("node")
            rows = _of(table, table.rows, choice)
            nowhere += sum(_is_nowhere(node.value(row)) for row in rows)
    if nowhere:
        verb = "belongs" if nowhere == 1 else "belong"
        are = "is" if nowhere == 1 else "are"
        yield f"{counted(nowhere, 'rows')} that {verb} to no node {are} left out."


def _whole(titles: Sequence[str], what: str, option: str) -> Iterator[str]:
    if titles:
        named = " and ".join(f'"{title}"' for title in titles)
        verb, them = ("shows", "it") if len(titles) == 1 else ("show", "them")
        yield f"{named} {verb} {what}: {option} does not apply to {them}."


def _is_nowhere(node: Value) -> bool:
    return not isinstance(node, int) or node == NUMA_NO_NODE


def _has_any(table: Table, fields: Sequence[str]) -> bool:
    return list(fields) == ["all"] or any(map(table.has, fields))


def chosen_rows(table: Table, rows: Sequence[Any], choice: Choice) -> list[Any]:
    """Return the rows of the memcgs and nodes that are wanted."""
    rows = _of(table, rows, choice)
    if choice.nodes:
        rows = [row for row in rows if any(_is_on(table, row, nid) for nid in choice.nodes)]
    return rows


def _choose(table: Table, choice: Choice) -> Table:
    rows = chosen_rows(table, table.rows, choice)
    if choice.sort is not None and table.has(choice.sort.partition(":")[0]):
        rows = _sorted(table, rows, choice.sort)
    return replace(
        table,
        columns=_columns(table, choice),
        rows=rows,
        totals=_totals(table, rows),
        # table.empty would be wrong if other memcgs or nodes have rows.
        empty=f"nothing of {choice.description}" if table.rows and not rows else table.empty,
    )


def as_path(wanted: str) -> str:
    """
    Return the path of a memcg as the kernel writes it: ``/web`` for ``web/``.

    :param wanted: a path, a shell pattern for paths, or an address
    """
    if not wanted or wanted.lower().startswith("0x"):
        return wanted
    # A wildcard at the beginning may match the slash.
    path = wanted if wanted[0] in "*?[" else f"/{wanted}"
    return re.sub("/+", "/", path).rstrip("/") or "/"


def matches(wanted: str, path: object, address: object) -> bool:
    """
    Return whether a memcg matches what the user asked for.

    Output has escapes in place of characters that are not printable. Such a name may be given as
    it is shown.

    :param wanted: a path, a shell pattern for paths, or an address
    :param path: path of the memcg
    :param address: ``struct mem_cgroup *``
    """
    if wanted.lower().startswith("0x"):
        return isinstance(address, int) and f"{address:#x}" == wanted.lower()
    if not isinstance(path, str):
        return False
    return any(name == wanted or fnmatchcase(name, wanted) for name in {path, printable(path)})


def _of(table: Table, rows: Sequence[Any], choice: Choice) -> list[Any]:
    """Return the rows of the memcgs that are wanted; all rows if the table has no memcgs."""
    if not choice.memcgs or not table.has("memcg"):
        return list(rows)
    path = table.column("memcg")
    if not table.has("memcg_address"):
        return [row for row in rows if choice.has(path.value(row), None)]
    address = table.column("memcg_address")
    return [row for row in rows if choice.has(path.value(row), address.value(row))]


def _is_on(table: Table, row: object, nid: int) -> bool:
    """Return whether a row belongs to a node, or has a part on it."""
    if table.has("node"):
        return table.column("node").value(row) == nid
    # What is no longer on the node has shrunk there.
    parts = [name for name in (f"node_{nid}", f"node_{nid}_growth") if table.has(name)]
    return not parts or any(table.column(name).value(row) not in (0, None) for name in parts)


def _sorted(table: Table, rows: list[Any], wanted: str) -> list[Any]:
    way = _direction(wanted)
    column = table.column(wanted.partition(":")[0])
    down = way == "desc" or (not way and column.type in AMOUNTS)
    # Rows without a value come last, in either order.
    known = [row for row in rows if isinstance(column.value(row), (int, float, str))]
    other = [row for row in rows if not isinstance(column.value(row), (int, float, str))]

    def size(row: object) -> Any:
        value = column.value(row)
        # The largest error first, whatever its sign.
        return abs(value) if not way and isinstance(value, (int, float)) and down else value

    return sorted(known, key=size, reverse=down) + other


def _direction(wanted: str) -> str:
    way = wanted.partition(":")[2]
    if way not in ("", "asc", "desc"):
        raise UsageError(f"--sort {wanted}: the order is :asc or :desc")
    return way


def _totals(table: Table, rows: Sequence[object]) -> dict[str, Value] | None:
    totals: dict[str, Value] = {}
    summed = _outermost(table, rows)
    for column in table.columns:
        if not column.total:
            continue
        values = [column.value(row) for row in summed]
        if rows and all(value is None for value in values):
            totals[column.name] = None  # the column does not apply to any row
            continue
        missing = next((v for v in values if isinstance(v, NotRead)), None)
        totals[column.name] = missing or sum(v for v in values if isinstance(v, (int, float)))
    return totals or None


def _outermost(table: Table, rows: Sequence[Any]) -> Sequence[Any]:
    """Return the rows that no other row includes."""
    parents = table.parents
    if parents is None:
        return rows

    def is_included(row: Any) -> bool:
        above = parents.get(row.memcg_address)
        while above is not None and (above, row.node) not in there:
            above = parents.get(above)
        return above is not None

    there = {(row.memcg_address, row.node) for row in rows}
    return [row for row in rows if not is_included(row)]


def _columns(table: Table, choice: Choice) -> tuple[Column, ...]:
    fields = choice.fields
    if fields is None:
        sort = (choice.sort or "").partition(":")[0]
        return tuple(
            replace(column, priority=CHOSEN) if column.name == sort else column
            for column in table.columns
            if column.shown
        )
    every = list(fields) == ["all"]
    names = [column.name for column in table.columns] if every else filter(table.has, fields)
    return tuple(replace(table.column(name), priority=CHOSEN, shares=False) for name in names)
