# SPDX-License-Identifier: LGPL-2.1-or-later
"""``overview`` is compared with the guest's memory.current, memory.stat and memory.numa_stat."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
from drgn import Program
from support.guest_files import still, still_current
from support.guests import KERNELS, GuestImage, Lab
from support.schemas import checked
from support.views import with_more_usage

from memcg_inspect.cli import main
from memcg_inspect.image.image import image_of
from memcg_inspect.views.overview import overview

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

Cell = tuple[str, int | None]

#: Bytes of user pages that four CPUs can have in their folio batches: 31 small folios each.
BATCHES = 4 * 31 * 4096
#: Bytes that the object stocks of four CPUs can hold: a page of each item for each of five slots.
STOCKS = 4 * 5 * 2 * 4096
#: The lines of memory.stat that show each field, and how much more or less a field may be.
LINES = {
    "user": (("inactive_anon", "active_anon", "inactive_file", "active_file", "unevictable"),
             range(BATCHES + 1)),
    "slab": (("slab_reclaimable", "slab_unreclaimable"), range(-STOCKS, STOCKS + 1)),
    "percpu": (("percpu",), range(1)),
    "stacks": (("kernel_stack",), range(1)),
    "pagetables": (("pagetables",), range(1)),
    "vmalloc": (("vmalloc",), range(1)),
    "sockets": (("sock",), range(1)),
    "zswap": (("zswap",), range(1)),
}  # fmt: skip
FIELDS = (*LINES, "other")


def rows_of(prog: Program, by_node: bool = False) -> list[dict[str, Any]]:
    [table] = overview(image_of(prog), by_node).tables
    return [table.values(row) for row in table.rows]


def compared(image: GuestImage, rows: dict[Cell, dict[str, Any]], name: str) -> dict[str, int]:
    """Compare rows with a file of each memcg; return how many of each field were not 0."""
    said, seen = still(image, name), defaultdict[str, int](int)
    for (path, nid), row in rows.items():
        for field, (items, differ) in LINES.items():
            read = [said.get((path, item, nid)) for item in items]
            if path == "/" or None in read or row[field] is None:
                continue  # memory of the guest's own programs changes
            total = sum(value or 0 for value in read)
            assert row[field] - total in differ, (path, field)
            seen[field] += bool(total)
    return seen


@pytest.mark.parametrize("kernel", KERNELS)
def test_amounts_are_what_the_guest_read(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    rows: dict[Cell, dict[str, Any]] = {(r["memcg"], None): r for r in rows_of(image.program())}
    current = still_current(image)
    assert len(current) > 30
    assert rows.keys() >= {(path, None) for path in current}
    assert (rows["/", None]["current"], rows["/", None]["not_found"]) == (None, None)
    assert {path: rows[path, None]["current"] for path in current} == current
    for (path, _), row in rows.items():
        assert row["sum"] == sum(row[field] for field in FIELDS)
        assert row["other"] == row["other_pages"] + row["unused"] + row["in_advance"]
        assert row["not_found"] == (None if path == "/" else 0)
        assert row["sum"] == row["current"] or path == "/"
    seen = compared(image, rows, "memory.stat")
    assert {field for field, number in seen.items() if number > 2} >= {
        *("user", "slab", "percpu", "stacks", "pagetables", "sockets"),
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_nodes_are_those_that_the_guest_read(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    rows = {(row["memcg"], row["node"]): row for row in rows_of(image.program(), by_node=True)}
    seen = compared(image, rows, "memory.numa_stat")
    assert min(seen[field] for field in ("user", "slab", "stacks", "pagetables")) > 4
    assert {nid for _, nid in rows} == {-1, 0, 1, 2, 3}
    whole = {row["memcg"]: row for row in rows_of(image.program())}
    for path, row in whole.items():
        parts = [part for (of, _), part in rows.items() if of == path]
        for field in (*FIELDS, "sum"):
            assert sum(part[field] or 0 for part in parts) == row[field], (path, field)
    for (_, nid), row in rows.items():
        has_node = {row[field] is not None for field in ("sockets", "unused", "in_advance")}
        assert has_node == {nid == -1}
        assert {row[field] is None for field in ("user", "slab", "zswap")} == {nid == -1}


@pytest.mark.parametrize("kernel", KERNELS)
def test_removed_memcgs_are_counted(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "dying")
    said = still(image, "cgroup.stat")
    rows = {row["memcg"]: row["dying"] for row in rows_of(image.program())}
    for path, dying in rows.items():
        subsys = said.get((path, "nr_dying_subsys_memory", None))
        expected = said.get((path, "nr_dying_descendants", None)) if subsys is None else subsys
        assert expected in (dying, None) or path == "/", path
    assert rows["/dying"] == rows["/"] > rows["/dying/family"] > 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_largest_come_first(lab: Lab, kernel: str) -> None:
    rows = rows_of(lab.image(kernel, "4", "mixed").program())
    assert [row["memcg"] for row in rows[:1]] == ["/"]
    sizes = [row["current"] for row in rows[1:]]
    assert sizes == sorted(sizes, reverse=True)
    on_nodes = [
        row["sum"] for row in rows_of(lab.image(kernel, "4", "mixed").program(), by_node=True)
    ]
    assert on_nodes == sorted(on_nodes, reverse=True)


def printed(capsys: pytest.CaptureFixture[str], image: GuestImage, *words: str) -> str:
    assert main(["overview", *words, "-c", str(image.core), "--debuginfo", "btf"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kernel", KERNELS)
def test_totals_count_nested_memcgs_once(
    lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = lab.image(kernel, "4", "mixed")
    rows = {row["memcg"]: row for row in rows_of(image.program())}

    def totals(*words: str) -> Any:
        return checked(json.loads(printed(capsys, image, "--json", *words)))["tables"][0]["totals"]

    assert totals()["slab"] == rows["/"]["slab"]
    assert totals("--memcg", "/files*")["slab"] == rows["/files"]["slab"]
    below = [row for path, row in rows.items() if path.startswith("/files/")]
    for field in ("current", "user", "slab"):
        assert totals("--memcg", "/files/*")[field] == sum(row[field] for row in below)
    shown = printed(capsys, image, "--memcg", "/files*", "--top", "1", "--fields", "memcg,slab")
    cells = [re.split(" {3,}", line.strip()) for line in shown.splitlines()]
    assert [f"({len(below)} other rows)", f"{sum(row['slab'] for row in below):,}"] in cells
    assert ["total", f"{rows['/files']['slab']:,}"] in cells


@pytest.mark.parametrize("kernel", KERNELS)
def test_memcgs_and_nodes_are_chosen(
    lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = lab.image(kernel, "4", "mixed")
    words = ("--node", "2", "--memcg", "/files/*", "--sort", "slab", "--fields", "memcg,node,slab")
    cells = [line.split("\t") for line in printed(capsys, image, "--scripted", *words).splitlines()]
    rows = rows_of(image.program(), by_node=True)
    wanted = [
        (row["slab"], row["memcg"])
        for row in rows
        if row["node"] == 2 and row["memcg"].startswith("/files/") and any(row[f] for f in FIELDS)
    ]
    assert sorted((int(size), path) for path, _, size in cells) == sorted(wanted)
    assert [int(size) for _, _, size in cells] == sorted((n for n, _ in wanted), reverse=True)
    assert {nid for _, nid, _ in cells} == {"2"}


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_found_is_said(lab: Lab, kernel: str) -> None:
    prog = with_more_usage(lab.image(kernel, "4", "mixed"), "/files/web", 7)
    answer = overview(image_of(prog))
    [table] = answer.tables
    wrong = {row.memcg: row.not_found for row in table.rows if row.not_found}
    assert wrong == {"/files/web": 7 * 4096}
    assert any("in 1 row, for example of /files/web" in note for note in answer.notes)
