# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Growth
------

Compares the answer of a command with an earlier one, of the running machine or of another dump:
:func:`read_earlier` reads the document of an earlier run (``--json``), and :func:`grown` compares
the tables. A row matches an earlier one if they have the same values in all columns other than
amounts, flags and addresses. Addresses change with each boot, so memcgs are identified by their
paths. A row that one of the two does not have is 0 there, if everything could be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeVar

from memcg_inspect.model import NUMA_NO_NODE, counted
from memcg_inspect.tables import (
    AMOUNTS,
    SCHEMA,
    Answer,
    Choice,
    Column,
    ColumnType,
    NotRead,
    Table,
    UsageError,
    Value,
    above,
    chosen_rows,
)

__all__ = (
    "Earlier",
    "EarlierTable",
    "GrownRow",
    "check_earlier",
    "growth_column",
    "grown",
    "read_earlier",
)

#: What tells a row from others, in the order of the columns.
_Key = tuple[Value, ...]
#: The values of a row, by name of the column.
_Values = Mapping[str, Value]
_T = TypeVar("_T")

#: The contents of tables of growth. They do not have all rows, so nothing is compared with them.
_GROWTH = "growth"
#: Numbers of a document are less, whatever their sign.
_LIMIT = 1 << 63
#: What the values of a column are in a document, by its type.
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("text", "memcg", "address"), (str,)),
    **dict.fromkeys(("node", "number", *AMOUNTS), (int,)),
    "flag": (bool,),
    "share": (int, float),
}


class EarlierTable(NamedTuple):
    """
    A table of an earlier run.

    :ivar contents: see :class:`~memcg_inspect.tables.Table`
    :ivar types: types of its columns, by name
    :ivar rows: the values of each row, by name of the column
    """

    contents: str | None
    types: Mapping[str, ColumnType]
    rows: Sequence[_Values]


class Earlier(NamedTuple):
    """
    The document of an earlier run.

    :ivar name: name of its file
    :ivar command: the command
    :ivar release: release of the kernel
    :ivar nodes: online nodes
    :ivar cpus: number of possible CPUs
    :ivar whole: whether everything was read
    :ivar chosen: the memcgs and nodes whose rows it has
    :ivar tables: its tables, by name
    """

    name: str
    command: str
    release: str
    nodes: tuple[int, ...]
    cpus: int
    whole: bool
    chosen: Choice
    tables: Mapping[str, EarlierTable]

    @property
    def memcgs(self) -> Set[str]:
        """Paths of the memcgs that rows are of, and of those above them."""
        paths = {row.get("memcg") for table in self.tables.values() for row in table.rows}
        return {some for path in paths if isinstance(path, str) for some in (path, *above(path))}


class GrownRow(SimpleNamespace):
    """
    How much one row grew. It has an attribute for each column, and these:

    :ivar memcg_address: ``struct mem_cgroup *``; for a memcg without rows now, a negative number in
        tables whose rows include those of memcgs below
    :ivar address: ``struct mem_cgroup *``; ``None`` if it has no rows now
    :ivar node: its node; ``None`` if rows have none
    :ivar has_changed: whether an amount grew or shrank, or may have
    """

    memcg_address: int | None
    address: int | None
    node: Value
    has_changed: bool


def read_earlier(name: str) -> Earlier:
    """
    Read the document of an earlier run.

    :param name: name of a file, with what a command printed with ``--json``
    :raises UsageError: if it is none
    """
    try:
        with open(name, encoding="utf-8") as file:
            document = json.load(file, parse_constant=_refuse)
    except OSError as error:
        raise UsageError(f"{name or repr(name)}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{name} is no document of a command: --json prints one") from None
    try:
        return _parsed(name, document)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{name} is no document with tables that this version can read: print it anew with "
            "--json"
        ) from None


def _refuse(constant: str) -> NoReturn:
    """Refuse ``NaN`` and infinite numbers, which are not JSON."""
    raise ValueError(constant)


def _parsed(name: str, document: Any) -> Earlier:
    if document["schema"] != SCHEMA:
        raise UsageError(f"{name} is of another schema than {SCHEMA}, which this version reads")
    image, chosen = document["image"], document["chosen"]
    return Earlier(
        name,
        _of(str, document["command"]),
        _of(str, image["release"]),
        _all_of(int, image["nodes"]),
        _of(int, image["cpus"]),
        _of(bool, document["whole"]),
        Choice(
            _all_of(str, chosen["memcgs"]),
            _all_of(int, chosen["nodes"]),
            subtree=_of(bool, chosen["subtree"]),
        ),
        {_of(str, table["name"]): _table(table) for table in _of(list, document["tables"])},
    )


def _table(table: Mapping[str, Any]) -> EarlierTable:
    contents = table["contents"]
    # Later versions may have other types of columns.
    types = {
        _of(str, column["name"]): column["kind"]
        for column in _of(list, table["columns"])
        if column["kind"] in _TYPES
    }
    rows = [_values(types, row) for row in _of(list, table["rows"])]
    return EarlierTable(None if contents is None else _of(str, contents), types, rows)


def _values(types: Mapping[str, ColumnType], row: Mapping[str, Any]) -> _Values:
    reasons = _of(dict, row.get("not_read", {}))
    return {
        name: NotRead(_of(str, reasons[name])) if name in reasons else _value(type, row[name])
        for name, type in types.items()
    }


def _value(type: ColumnType, value: Any) -> Value:
    if value is None:
        return None
    found: int | float | str = _of(_TYPES[type], value)
    if not isinstance(found, str) and abs(found) >= _LIMIT:
        raise ValueError(f"{type} is too large")
    return found


def _of(wanted: type[_T] | tuple[type[_T], ...], value: Any) -> _T:
    """
    Return a value of a document.

    :raises TypeError: if it has another type. ``True`` is no number.
    """
    if type(value) not in (wanted if isinstance(wanted, tuple) else (wanted,)):
        raise TypeError(f"{wanted} expected")
    found: _T = value
    return found


def _all_of(wanted: type[_T], values: Any) -> tuple[_T, ...]:
    return tuple(_of(wanted, value) for value in _of(list, values))


def check_earlier(earlier: Earlier, command: str, choice: Choice) -> None:
    """
    Check that an earlier run can be compared with one of now.

    :param command: name of the command of now
    :param choice: the rows that are wanted now
    :raises UsageError: if it cannot
    """
    if earlier.command != command:
        raise UsageError(f"{earlier.name} is of {earlier.command}, and not of {command}")
    addresses = [wanted for wanted in choice.memcgs if wanted.lower().startswith("0x")]
    if addresses:
        raise UsageError(
            f"--since compares memcgs by their paths, so --memcg {addresses[0]} must be a path"
        )
    then, now = (_rows_of(some) for some in (earlier.chosen, choice))
    if then not in (_rows_of(Choice()), now):
        raise UsageError(
            f"{earlier.name} lists rows of {earlier.chosen.description} only: give the same "
            "--memcg, --subtree and --node, or print it anew without them"
        )


def _rows_of(choice: Choice) -> Choice:
    return Choice(tuple(choice.memcgs), tuple(choice.nodes), subtree=choice.subtree)


def growth_column(column: Column) -> Column:
    """Return the column that tells how much an amount grew."""
    return replace(
        column,
        name=f"{column.name}_growth",
        type="difference",
        help=f"growth of {column.name}, in the same unit",
        field="",
        key=None,
        in_bytes=column.type == "bytes",
        shares=False,
    )


def grown(answer: Answer, earlier: Earlier, choice: Choice) -> Answer:
    """
    Return what grew and what shrank, the largest growth first.

    :param answer: of now; all rows, and all columns
    :param choice: the rows that are wanted, of which notes are
    :raises UsageError: if the earlier run has other tables or columns
    """
    gone = _missing(answer.is_whole, "not found now, and not everything could be read")
    new = _missing(
        earlier.whole, f"not found for {earlier.name}, for which not everything could be read"
    )
    tables, same = [], 0
    for table in answer.tables:
        columns = _Columns(table, gone, new)
        found, left_out = _grown(table, columns, columns.rows_of(earlier, table), earlier.name)
        tables.append(found)
        same += len(chosen_rows(found, left_out, choice))
    return replace(
        answer,
        tables=tuple(tables),
        notes=(*answer.notes, *_notes(answer, earlier, same)),
        unanswered=answer.unanswered or not earlier.whole,
    )


def _missing(is_whole: bool, why: str) -> Value:
    """Return the amounts of rows that are not there."""
    return 0 if is_whole else NotRead(why)


def _notes(answer: Answer, earlier: Earlier, same: int) -> Iterator[str]:
    if same:
        are = "is" if same == 1 else "are"
        yield f"{counted(same, 'rows')} that neither grew nor shrank {are} left out."
    if not earlier.whole:
        yield (
            f"Not everything could be read for {earlier.name}: what grew may have been there "
            "before."
        )
    if not answer.is_whole:
        yield "Not everything could be read now: what shrank may still be there."
    assert answer.image is not None
    if earlier.release != answer.image.release:
        yield (
            f"{earlier.name} is of another kernel, {earlier.release}: lines of code and caches may "
            "have other names."
        )
    if (earlier.cpus, earlier.nodes) != (answer.image.cpus, tuple(answer.image.nodes)):
        yield (
            f"{earlier.name} is of a machine with other CPUs or nodes: "
            f"{counted(earlier.cpus, 'possible CPUs')}, and nodes "
            f"{', '.join(map(str, earlier.nodes))}."
        )


def _grown(
    table: Table, columns: _Columns, before: Iterable[_Values], name: str
) -> tuple[Table, list[GrownRow]]:
    """
    Return how much the rows of a table grew, and the rows that did not.

    :param before: the rows of the earlier run
    :param name: its name
    """
    now = columns.added_up(_plain_values(table, record) for record in table.rows)
    then = columns.added_up(before)
    rows = [columns.row(now.get(key), then.get(key)) for key in {**now, **then}]
    parents = _identified(rows, table.parents)
    changed = [row for row in rows if row.has_changed]
    # Without the memcgs above, a total would count what moved from one memcg below to another.
    needed = set() if parents is None else _places_above(changed, parents)
    listed, left_out = list[GrownRow](), list[GrownRow]()
    for row in rows:
        is_needed = row.has_changed or (row.memcg_address, row.node) in needed
        (listed if is_needed else left_out).append(row)
    found = replace(
        table,
        title=f"{table.title}: growth since {name}",
        columns=tuple(columns.shown()),
        rows=sorted(listed, key=columns.order),
        empty="nothing grew or shrank",
        parents=parents,
        contents=_GROWTH,
    )
    return found, left_out


def _identified(
    rows: Sequence[GrownRow], parents: Mapping[int, int | None] | None
) -> Mapping[int, int | None] | None:
    """
    Give rows of the same memcg, by its path, the same address.

    :param parents: see :class:`~memcg_inspect.tables.Table`
    :return: the same, also of memcgs that are gone. These count for the nearest memcg above them
        that there is.
    """
    known: dict[Value, set[int]] = {}
    for row in rows:
        if row.address is not None:
            known.setdefault(row.memcg, set()).add(row.address)
    places = {path: min(found) for path, found in known.items() if len(found) == 1}
    for row in rows:
        if row.address is None:
            row.memcg_address = row.address = places.get(getattr(row, "memcg", None))
    if parents is None:
        return None
    gone: dict[Value, int] = {}
    for row in rows:
        if row.address is None:
            row.memcg_address = gone.setdefault(row.memcg, -1 - len(gone))
    places.update(gone)
    nearest = {
        number: next((places[some] for some in above(str(path)) if some in places), None)
        for path, number in gone.items()
    }
    return {**parents, **nearest}


def _places_above(
    rows: Iterable[GrownRow], parents: Mapping[int, int | None]
) -> set[tuple[int, Value]]:
    """Return address and node of the rows that include any of these."""
    found: set[tuple[int, Value]] = set()
    for row in rows:
        memcg = None if row.memcg_address is None else parents.get(row.memcg_address)
        while memcg is not None and (memcg, row.node) not in found:
            found.add((memcg, row.node))
            memcg = parents.get(memcg)
    return found


def _plain_values(table: Table, record: object) -> _Values:
    """Return the values of a row as they are in a document, but for addresses."""
    values: dict[str, Value] = {}
    for column in table.columns:
        value = column.value(record)
        is_nowhere = column.type == "node" and value == NUMA_NO_NODE
        values[column.name] = None if is_nowhere else value
    return values


#: What paths have for the name of a memcg that could not be read.
_NO_NAME = re.compile(r"<memcg 0x[0-9a-f]+>")


class _Sum(NamedTuple):
    """
    Rows with the same key. Removed memcgs may have the path of another memcg.

    :ivar values: key, flags, and sums of amounts, by name of the column
    :ivar memcg: ``struct mem_cgroup *``; ``None`` if there are several, or none
    """

    values: dict[str, Value]
    memcg: int | None


class _Columns:
    """The columns of a table that can be compared."""

    def __init__(self, table: Table, gone: Value, new: Value) -> None:
        """
        Choose columns.

        :param gone: the amounts now of rows that only the earlier run has
        :param new: the amounts then of rows that only the run of now has
        """
        self._gone, self._new = gone, new
        self._names = [c for c in table.columns if c.type not in AMOUNTS and c.type != "address"]
        # What a flag says may change.
        self._keys = [column for column in self._names if column.type != "flag"]
        self._flags = [column for column in self._names if column.type == "flag"]
        self._sums = [column for column in table.columns if column.total]
        self._addresses = [column for column in table.columns if column.name == "memcg_address"]
        self._main = next((c for c in self._sums if c.shares), self._sums[0])

    def rows_of(self, earlier: Earlier, table: Table) -> Sequence[_Values]:
        """
        Return the rows of an earlier run.

        :raises UsageError: if they cannot be compared with a table of now
        """
        before = earlier.tables.get(table.name)
        # Nothing was on nodes that were not online.
        online = {
            column.name: 0 for column in self._sums if column.key not in (None, *earlier.nodes)
        }
        if (
            before is None
            or before.contents != table.contents
            or any(
                before.types.get(c.name, c.type if c.name in online else None) != c.type
                for c in (*self._names, *self._sums)
            )
        ):
            raise UsageError(
                f"{earlier.name} has other rows or columns: print it anew with the options that "
                "are given now, and without --fields and --since"
            )
        return [{**online, **values} for values in before.rows]

    def added_up(self, rows: Iterable[_Values]) -> dict[_Key, _Sum]:
        """Add up rows with the same key."""
        found: dict[_Key, _Sum] = {}
        for values in rows:
            key = tuple(_known(values[column.name]) for column in self._keys)
            address = values.get("memcg_address")
            memcg = address if isinstance(address, int) else None
            before = found.get(key)
            if before is None:
                names = (column.name for column in (*self._names, *self._sums))
                found[key] = _Sum({name: values[name] for name in names}, memcg)
                continue
            for column in self._sums:
                before.values[column.name] = _added(before.values[column.name], values[column.name])
            for column in self._flags:
                if before.values[column.name] != values[column.name]:
                    before.values[column.name] = None
            if memcg != before.memcg:
                found[key] = before._replace(memcg=None)
        return found

    def row(self, now: _Sum | None, then: _Sum | None) -> GrownRow:
        """Return how much a row grew. One of them may be missing."""
        some = now or then
        assert some is not None
        values, has_changed = dict(some.values), False
        lost = self._lost(values)
        for column in self._sums:
            name = column.name
            after = self._gone if now is None else now.values[name]
            before = self._new if then is None else then.values[name]
            if some.values[name] is None and (now is None or then is None):
                after = before = None  # it does not apply
            growth = _growth(after, before)
            if growth is not None and lost is not None:
                growth = lost
            values[name], values[growth_column(column).name] = after, growth
            has_changed |= after != before or isinstance(growth, NotRead)
        memcg = None if now is None else now.memcg
        return GrownRow(
            **{"node": None, **values}, memcg_address=memcg, address=memcg, has_changed=has_changed
        )

    def _lost(self, values: _Values) -> NotRead | None:
        """
        Return why it is not known what a row is of.

        In the other run it may have been read, and be in other rows.
        """
        if not (isinstance(self._gone, NotRead) or isinstance(self._new, NotRead)):
            return None
        keys = [values[column.name] for column in self._keys]
        if any(isinstance(value, str) and _NO_NAME.search(value) for value in keys):
            return NotRead("the name of a memcg could not be read")
        return next((value for value in keys if isinstance(value, NotRead)), None)

    def order(self, row: GrownRow) -> tuple[object, ...]:
        """Return a key that puts the largest growth first, and what is not known last."""
        growth = growth_column(self._main).value(row)
        size = -growth if isinstance(growth, (int, float)) else None
        return size is None, size or 0, *(str(column.value(row)) for column in self._names)

    def shown(self) -> Iterator[Column]:
        """Return the columns of growth. Text has the main amount itself, too."""
        yield from self._names
        yield from (replace(column, field="address") for column in self._addresses)
        rest = [column for column in self._sums if column is not self._main]
        main = replace(self._main, field="", key=None, shares=False, priority=9)
        yield from (main, growth_column(main))
        for column in rest:
            yield replace(column, field="", key=None, shown=False)
            yield growth_column(column)


def _known(value: Value) -> Value:
    """Return a value that can be compared: why it could not be read does not matter."""
    return NotRead("") if isinstance(value, NotRead) else value


def _added(one: Value, other: Value) -> Value:
    """Return the sum; unknown if one of them is, ``None`` if neither applies."""
    known = [value for value in (one, other) if value is not None]
    unread = next((value for value in known if isinstance(value, NotRead)), None)
    return unread or (_number(known) if known else None)


def _growth(after: Value, before: Value) -> Value:
    """Return the difference; ``None`` if one of them does not apply, unknown if one is."""
    if after is None or before is None:
        return None
    unread = next((value for value in (after, before) if isinstance(value, NotRead)), None)
    return unread or _number([after]) - _number([before])


def _number(values: Iterable[Value]) -> int | float:
    return sum(value for value in values if isinstance(value, (int, float)))
