# SPDX-License-Identifier: LGPL-2.1-or-later
"""Views run as on the command line, and their answers compared with those of a whole image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import drgn

from memcg_inspect.arguments import Parser
from memcg_inspect.helpers import find_memcg
from memcg_inspect.image.image import image_of
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.model import NUMA_NO_NODE
from memcg_inspect.subcommands import add_subcommands
from memcg_inspect.tables import Answer, NotRead, Table, Value
from support.guests import GuestImage

Row = dict[str, Value]

ROW_KEYS = ("memcg", "memcg_address", "node")


def with_more_usage(image: GuestImage, path: str, pages: int) -> drgn.Program:
    """Return a program of an image in which the page counter of a memcg has so many pages more."""
    prog = image.own_program()
    counter = find_memcg(prog, path).memory.usage.counter
    planted = (int(counter) + pages).to_bytes(8, "little")

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return planted[offset : offset + count]

    prog.add_memory_segment(counter.address_of_(), 8, read, False)
    return prog


def ask(prog: drgn.Program, *arguments: str) -> Answer:
    parser = Parser()
    add_subcommands(parser)
    args = parser.parse_args(arguments)
    with as_image_errors():
        answer: Answer = args.view.run(image_of(prog), args)
    return answer


def keyed(table: Table, *key: str) -> dict[tuple[Value, ...], Row]:
    rows = [table.values(row) for row in table.rows]
    return {tuple(row[name] for name in key): row for row in rows}


def same(found: Answer, truth: Answer, *key: str) -> None:
    """Check that each row is a row of *truth*, with the same values or unreadable ones."""
    rows = keyed(truth.tables[0], *key)
    for row in keyed(found.tables[0], *key).values():
        other = rows[tuple(row[name] for name in key)]
        for name, value in row.items():
            # With a memcg, its name is missing, and which memcg pays.
            assert value == other[name] or isinstance(value, NotRead) or (
                name in ("memcg", "objcg_memcg", "memcg_address", "comm", "cache")
                or (name == "nodes" and "?" in str(value))
            ), (name, row, other)  # fmt: skip


def same_stat(found: Answer, truth: Answer) -> None:
    same(found, truth, "item", "node")
    assert len(found.tables[0].rows) >= len(truth.tables[0].rows) - 3


def same_nodes(found: Answer, truth: Answer) -> None:
    """Check amounts on nodes; what has lost its node may be where nothing was."""
    there, table = keyed(truth.tables[0], "memcg_address", "node"), found.tables[0]
    rows = [
        row
        for row in table.rows
        if (row.memcg_address, row.node) in there and row.node != NUMA_NO_NODE
    ]
    same(replace(found, tables=(replace(table, rows=rows),)), truth, "memcg_address", "node")
    for row in table.rows:
        if (row.memcg_address, row.node) not in there and row.node != NUMA_NO_NODE:
            values = (v for c, v in table.values(row).items() if c not in ROW_KEYS)
            assert all(not v or isinstance(v, NotRead) for v in values), row


def no_more(found: Answer, truth: Answer) -> None:
    """Check that sums of slabs are not above those of *truth*."""
    rows = keyed(truth.tables[0], "memcg_address", "cache_address", "size", "node")
    for key, row in keyed(
        found.tables[0], "memcg_address", "cache_address", "size", "node"
    ).items():
        if row["memcg"] is None or isinstance(row["memcg"], NotRead) or key not in rows:
            continue
        for name in ("objects", "bytes", "charged", "slabs", "slab_bytes"):
            value, most = row[name], rows[key][name]
            assert isinstance(value, NotRead) or value is None or value <= most, (name, row)  # type: ignore[operator]


VIEWS: dict[tuple[str, ...], Callable[[Answer, Answer], None]] = {
    ("overview",): lambda found, truth: same(found, truth, "memcg_address"),
    ("overview", "--by-node"): same_nodes,
    ("slabinfo", "--by-node"): no_more,
    ("percpu", "--each"): lambda found, truth: same(found, truth, "pointer"),
    ("stat", "/", "--all"): same_stat,
    ("stock",): lambda found, truth: same(found, truth, "cpu", "stock", "slot"),
    ("tasks",): lambda found, truth: same(found, truth, "task", "objcg"),
}


def rows(answer: Answer, table: int = 0) -> list[Row]:
    """Return the rows of a table of an answer."""
    return [answer.tables[table].values(row) for row in answer.tables[table].rows]


def number(row: Row, field: str) -> int:
    """Return a field that is a number."""
    value = row[field]
    assert isinstance(value, int), (field, value)
    return value
