# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Growth
------

Compares the answer of a command with an earlier one, of the running machine or of another dump:
:func:`read_earlier` reads the document of an earlier run (``--json``), and :func:`grown` compares
the tables. A row matches an earlier one if they have the same values in all columns other than
amounts and addresses. Addresses change with each boot, so memcgs are identified by their paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from memcg_inspect.model import NUMA_NO_NODE, counted
from memcg_inspect.tables import (
    AMOUNTS,
    Answer,
    Choice,
    Column,
    NotRead,
    Table,
    UsageError,
    Value,
    above,
)

__all__ = ("Earlier", "GrownRow", "check_earlier", "growth_column", "grown", "read_earlier")

#: What tells a row from others, in the order of the columns.
_Key = tuple[Value, ...]
#: The values of a row, by name of the column.
_Values = Mapping[str, Value]


class Earlier(NamedTuple):
    """
    The document of an earlier run.

    :ivar name: name of its file
    :ivar command: the command
    :ivar release: release of the kernel
    :ivar whole: whether everything was read
    :ivar chosen: the memcgs and nodes whose rows it has
    :ivar tables: rows by name of the table; the values of a row, by name of the column
    """

    name: str
    command: str
    release: str
    whole: bool
    chosen: Choice
    tables: Mapping[str, Sequence[_Values]]

    @property
    def memcgs(self) -> Set[Value]:
        """Paths of the memcgs that rows are of."""
        return {row.get("memcg") for rows in self.tables.values() for row in rows}


class GrownRow(SimpleNamespace):
    """
    How much one row grew. It has an attribute for each column, and these:

    :ivar memcg_address: ``struct mem_cgroup *``; a negative number if the memcg is gone
    :ivar address: ``struct mem_cgroup *``; ``None`` if it is gone
    :ivar node: its node; ``None`` if rows have none
    """

    memcg_address: int | None
    address: int | None
    node: Value


def read_earlier(name: str) -> Earlier:
    """
    Read the document of an earlier run.

    :param name: name of a file, with what a command printed with ``--json``
    :raises UsageError: if it is none
    """
    try:
        with open(name, encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{name} is no document of a command: --json prints one") from None
    try:
        return _parsed(name, document)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{name} is no document with tables that this version can read: print it anew with "
            "--json"
        ) from None


def _parsed(name: str, document: Any) -> Earlier:
    chosen = document["chosen"]
    tables = {
        table["name"]: [_values(table["columns"], row) for row in table["rows"]]
        for table in document["tables"]
    }
    return Earlier(
        name,
        str(document["command"]),
        str(document["image"]["release"]),
        document["whole"] is True,
        Choice(
            tuple(map(str, chosen["memcgs"])),
            tuple(map(int, chosen["nodes"])),
            subtree=bool(chosen["subtree"]),
        ),
        tables,
    )


def _values(columns: Iterable[Mapping[str, str]], row: Mapping[str, Any]) -> _Values:
    reasons = row.get("not_read", {})
    values: dict[str, Value] = {}
    for column in columns:
        name, value = column["name"], row[column["name"]]
        kinds = (int, float) if column["kind"] in AMOUNTS else (str, int)
        if not (value is None or isinstance(value, kinds)):
            raise ValueError(name)
        values[name] = NotRead(str(reasons[name])) if name in reasons else value
    return values


def check_earlier(earlier: Earlier, command: str, choice: Choice) -> None:
    """
    Check that an earlier run can be compared with one of now.

    :param command: name of the command of now
    :param choice: the rows that are wanted now
    :raises UsageError: if it cannot
    """
    if earlier.command != command:
        raise UsageError(
            f"{earlier.name} is of {earlier.command}, and can be compared with {earlier.command} "
            "only"
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


def grown(answer: Answer, earlier: Earlier) -> Answer:
    """
    Return what grew and what shrank, the largest growth first.

    :param answer: of now; all rows, and all columns
    :raises UsageError: if the earlier run has other tables or columns
    """
    if answer.text is not None:
        raise UsageError("--since compares tables, not text in the format of another program")
    tables, same = [], 0
    for table in answer.tables:
        if not any(column.total for column in table.columns):
            tables.append(table)
            continue
        before = earlier.tables.get(table.name)
        if before is None:
            raise _is_of_other_options(earlier)
        found, left_out = _grown(table, before, earlier)
        tables.append(found)
        same += left_out
    return replace(
        answer,
        tables=tuple(tables),
        notes=(*answer.notes, *_notes(answer, earlier, same)),
        unanswered=answer.unanswered or not earlier.whole,
    )


def _is_of_other_options(earlier: Earlier) -> UsageError:
    return UsageError(
        f"{earlier.name} has other rows or columns: print it anew with the options that are given "
        "now, and without --fields"
    )


def _notes(answer: Answer, earlier: Earlier, same: int) -> Iterator[str]:
    if same:
        yield f"{counted(same, 'rows')} that neither grew nor shrank are left out."
    if not earlier.whole:
        yield (
            f"Not everything could be read for {earlier.name}. What was missing there shows as "
            "growth."
        )
    if earlier.release != answer.image.release:
        yield (
            f"{earlier.name} is of another kernel, {earlier.release}: lines of code and caches may "
            "have other names."
        )


def _grown(table: Table, before: Sequence[_Values], earlier: Earlier) -> tuple[Table, int]:
    """Return how much the rows of a table grew, and how many rows did not."""
    columns = _Columns(table)
    if any(columns.names - values.keys() for values in before):
        raise _is_of_other_options(earlier)
    now = columns.added_up(_plain_values(table, record) for record in table.rows)
    then = columns.added_up(before)
    rows: list[GrownRow] = []
    parents = None if table.parents is None else dict(table.parents)
    addresses = {some.values["memcg"]: some.memcg for some in now.values()} if parents else {}
    for key in {**now, **then}:
        row = columns.row(now.get(key), then.get(key))
        if parents is not None and row.memcg_address is None:
            # It counts for the nearest memcg above it that there is.
            gone = -1 - len(rows)
            paths = (path for path in above(str(row.memcg)) if path in addresses)
            parents[gone] = addresses.get(next(paths, None))
            row.memcg_address = gone
        rows.append(row)
    changed = sorted((row for row in rows if columns.has_changed(row)), key=columns.order)
    return (
        replace(
            table,
            title=f"{table.title}: growth since {earlier.name}",
            columns=tuple(columns.shown()),
            rows=changed,
            empty="nothing grew or shrank",
            parents=parents,
        ),
        len(rows) - len(changed),
    )


def _plain_values(table: Table, record: object) -> _Values:
    """Return the values of a row as they are in a document, but for addresses."""
    values: dict[str, Value] = {}
    for column in table.columns:
        value = column.value(record)
        is_nowhere = column.type == "node" and value == NUMA_NO_NODE
        values[column.name] = None if is_nowhere else value
    return values


class _Sum(NamedTuple):
    """
    Rows with the same key. Removed memcgs may have the path of another memcg.

    :ivar values: key, and sums of amounts, by name of the column
    :ivar memcg: ``struct mem_cgroup *``; ``None`` if there are several, or none
    """

    values: dict[str, Value]
    memcg: int | None


class _Columns:
    """
    The columns of a table that can be compared.

    :ivar names: their names
    """

    def __init__(self, table: Table) -> None:
        self._keys = [c for c in table.columns if c.type not in AMOUNTS and c.type != "address"]
        self._sums = [c for c in table.columns if c.total]
        self._addresses = [c for c in table.columns if c.name == "memcg_address"]
        self._main = next((c for c in self._sums if c.shares), self._sums[0])
        self.names = frozenset(c.name for c in (*self._keys, *self._sums))

    def added_up(self, rows: Iterable[_Values]) -> dict[_Key, _Sum]:
        """Add up rows with the same key."""
        found: dict[_Key, _Sum] = {}
        for values in rows:
            key = tuple(_known(values[column.name]) for column in self._keys)
            address = values.get("memcg_address")
            memcg = address if isinstance(address, int) else None
            before = found.get(key)
            if before is None:
                found[key] = _Sum({name: values[name] for name in self.names}, memcg)
                continue
            for column in self._sums:
                before.values[column.name] = _plus(
                    before.values[column.name], values[column.name], 1
                )
            if memcg != before.memcg:
                found[key] = before._replace(memcg=None)
        return found

    def row(self, now: _Sum | None, then: _Sum | None) -> GrownRow:
        """Return how much a row grew. One of them may be missing."""
        some = now or then
        assert some is not None
        values = dict(some.values)
        for column in self._sums:
            after = None if now is None else now.values[column.name]
            before = None if then is None else then.values[column.name]
            values[growth_column(column).name] = _plus(after, before, -1)
            values[column.name] = 0 if now is None and before is not None else after
        memcg = None if now is None else now.memcg
        return GrownRow(**{"node": None, **values}, memcg_address=memcg, address=memcg)

    def has_changed(self, row: GrownRow) -> bool:
        """Return whether an amount of a row grew or shrank, or may have."""
        return any(growth_column(column).value(row) for column in self._sums)

    def order(self, row: GrownRow) -> tuple[object, ...]:
        """Return a key that puts the largest growth first, and what is not known last."""
        growth = growth_column(self._main).value(row)
        size = -growth if isinstance(growth, (int, float)) else None
        return size is None, size or 0, *(str(column.value(row)) for column in self._keys)

    def shown(self) -> Iterator[Column]:
        """Return the columns of growth. Text has the main amount itself, too."""
        yield from self._keys
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


def _plus(one: Value, other: Value, sign: int) -> Value:
    """Return the sum, or the difference; unknown if one of them is, ``None`` if neither applies."""
    for value in (one, other):
        if isinstance(value, NotRead):
            return value
    known = [v if isinstance(v, (int, float)) else None for v in (one, other)]
    if known == [None, None]:
        return None
    return (known[0] or 0) + sign * (known[1] or 0)
