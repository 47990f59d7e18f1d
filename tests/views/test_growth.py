# SPDX-License-Identifier: LGPL-2.1-or-later
"""``--since``: what grew between two images, by files that a scene created in one of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from support.guests import ROOT, Lab
from support.schemas import checked
from support.terminals import on_terminal

from memcg_inspect.cli import main

pytestmark = pytest.mark.image

#: What the scene leaves behind: files by memcg.
CREATED = {"/files/web": 2_000, "/leak": 300}
CLI = [sys.executable, "-m", "memcg_inspect"]
SCENE = str(ROOT / "fixtures/scenes/leak.sh")


@pytest.fixture(scope="module")
def cores(lab: Lab) -> tuple[str, str]:
    """Return an image, and one of the same machine with more files."""
    made = (lab.image("7.3", "2"), lab.image("7.3", "2", run=SCENE))
    return str(made[0].core), str(made[1].core)


class Runs:
    """Runs commands."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self._folder = folder
        self.said = ""

    def text(self, core: str, *words: str, status: int = 0) -> str:
        assert main([*words, "--debuginfo", "btf", "-c", core]) == status
        captured = self._capsys.readouterr()
        self.said = captured.err
        return captured.out

    def document(self, core: str, *words: str) -> dict[str, Any]:
        return checked(json.loads(self.text(core, *words, "--json")))

    def earlier(self, core: str, *words: str) -> str:
        """Return the name of a file with a document."""
        file = self._folder / f"{len(list(self._folder.iterdir()))}.json"
        file.write_text(self.text(core, *words, "--json"))
        return str(file)


@pytest.fixture
def runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Runs:
    return Runs(capsys, tmp_path)


def rows_of(document: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    [table, *_] = document["tables"]
    names = ("memcg", "cache", "node")
    found = {tuple(row.get(name) for name in names): row for row in table["rows"]}
    assert len(found) == len(table["rows"])
    return found


def test_caches_that_grew(runs: Runs, cores: tuple[str, str]) -> None:
    """Each file is one inode of tmpfs, charged to who created it, whichever image is first."""
    by = ("slabinfo", "--by", "memcg,cache")
    for (first, second), sign in ((cores, 1), (cores[::-1], -1)):
        rows = rows_of(runs.document(second, *by, "--since", runs.earlier(first, *by)))
        inodes = {
            memcg: row for (memcg, cache, _), row in rows.items() if cache == "shmem_inode_cache"
        }
        grew = {memcg: inodes[memcg]["objects_growth"] for memcg in CREATED}
        assert grew == {memcg: sign * files for memcg, files in CREATED.items()}
        gone = inodes["/leak"]
        assert (gone["objects"] == 0) == (sign < 0)
        assert all(
            any(row[f"{n}_growth"] for n in ("objects", "bytes", "charged"))
            for row in rows.values()
        )
        # The largest growth comes first.
        sizes = [row["bytes_growth"] for row in rows.values()]
        assert sizes == sorted(sizes, reverse=True)


def test_growth_is_the_difference_of_both(runs: Runs, cores: tuple[str, str]) -> None:
    """Of all rows and columns that have a sum, and of their totals."""
    for words in (("slabinfo", "--by", "cache,node"), ("percpu", "--by", "memcg"), ("overview",)):
        before, now = (runs.document(core, *words) for core in cores)
        grew = runs.document(cores[1], *words, "--since", runs.earlier(cores[0], *words))
        for old, new, table in zip(before["tables"], now["tables"], grew["tables"], strict=True):
            names = [
                c["name"] for c in table["columns"] if f"{c['name']}_growth" in table["totals"]
            ]
            assert names
            for name in names:
                then, after = old["totals"][name], new["totals"][name]
                if then is not None and after is not None:
                    assert table["totals"][f"{name}_growth"] == after - then, (words, name)


def test_what_is_the_same_is_left_out(runs: Runs, cores: tuple[str, str]) -> None:
    before = runs.earlier(cores[0], "overview", "--by-node")
    grew = runs.document(cores[0], "overview", "--by-node", "--since", before)
    assert [table["rows"] for table in grew["tables"]] == [[]]
    assert any("neither grew nor shrank" in note for note in grew["notes"])
    assert "nothing grew or shrank" in runs.text(
        cores[0], "overview", "--by-node", "--since", before
    )


def test_text_has_the_largest_growth(runs: Runs, cores: tuple[str, str]) -> None:
    before = runs.earlier(cores[0], "slabinfo", "--by", "memcg,cache")
    words = ("slabinfo", "--by", "memcg,cache", "--since", before, "--top", "1")
    text = runs.text(cores[1], *words)
    assert text.splitlines()[0] == f"slab objects by memcg and cache: growth since {before}"
    [line] = [line for line in text.splitlines() if "shmem_inode_cache" in line]
    assert "+2,000" in line
    assert "other rows" in text


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal(runs: Runs, cores: tuple[str, str], columns: int) -> None:
    """The amounts that matter most are never left out."""
    by = {"slabinfo": ("--by", "memcg,cache"), "percpu": ("--by", "memcg"), "overview": ()}
    for name, words in by.items():
        since = ("--since", runs.earlier(cores[0], name, *words))
        command = [*CLI, name, *words, *since, "-c", cores[1], "--debuginfo", "btf"]
        status, shown = on_terminal(command, columns)
        assert status == 0
        assert ": growth since" in shown
        [head] = [line for line in shown.splitlines() if line.startswith(" memcg ")]
        main = "sum" if name == "overview" else "bytes"
        assert {"memcg", main, f"{main}_growth"} <= set(head.split())
        assert all(cell_len(line) <= columns for line in shown.splitlines() if since[1] not in line)


def test_rows_and_fields_are_chosen(runs: Runs, cores: tuple[str, str]) -> None:
    """Rows of memcgs that are gone, too, as far as their paths tell."""
    by = ("slabinfo", "--by", "memcg,cache")
    some = ("--memcg", "/l*", "--subtree")
    for before in (runs.earlier(cores[1], *by), runs.earlier(cores[1], *by, *some)):
        grew = runs.document(cores[0], *by, *some, "--since", before)
        assert {key[0] for key in rows_of(grew)} == {"/leak"}
    before = runs.earlier(cores[0], *by)
    grew = runs.document(
        cores[1], *by, "--since", before, "--memcg", "/leak",
        "--fields", "memcg,cache,objects_growth", "--sort", "objects_growth:asc",
    )  # fmt: skip
    [table] = grew["tables"]
    assert [column["name"] for column in table["columns"]] == ["memcg", "cache", "objects_growth"]
    assert {row["memcg"] for row in table["rows"]} == {"/leak"}
    numbers = [row["objects_growth"] for row in table["rows"]]
    assert numbers == sorted(numbers)


def test_documents_that_cannot_be_compared(
    runs: Runs, cores: tuple[str, str], tmp_path: Path
) -> None:
    by = ("slabinfo", "--by", "cache")
    of_cache = runs.earlier(cores[0], *by)
    document = json.loads(Path(of_cache).read_text())
    texts = {
        "": "is no document of a command",
        "[" * 100_000: "is no document of a command",
        "[]": "is no document with tables",
        "{}": "is no document with tables",
        json.dumps({**document, "tables": [{"name": "slabinfo"}]}): "is no document with tables",
        json.dumps({**document, "chosen": {}}): "is no document with tables",
        json.dumps(
            {**document, "chosen": {"memcgs": [7], "nodes": [], "subtree": False}}
        ): "lists rows of memcg 7 only",
        json.dumps(document).replace('"dentry"', '["dentry"]'): "is no document with tables",
        json.dumps({**document, "command": "percpu"}): "is of percpu",
    }
    for text, said in texts.items():
        file = tmp_path / "wrong"
        file.write_text(text)
        runs.text(cores[0], *by, "--since", str(file), status=2)
        assert said in runs.said, text[:40]
        assert runs.said.count("\n") == 1
    for words, said in (
        (("slabinfo", "--since", of_cache), "has other rows or columns"),
        ((*by, "--since", str(tmp_path / "none")), "No such file"),
        ((*by, "--since", str(tmp_path)), "Is a directory"),
        (
            (*by, "--since", runs.earlier(cores[0], *by, "--memcg", "/files/*")),
            "lists rows of memcg /files/* only",
        ),
        (
            (*by, "--since", runs.earlier(cores[0], *by, "--fields", "cache,bytes")),
            "has other rows or columns",
        ),
        (("stat", "--since", of_cache), "unrecognized arguments"),
        ((*by, "--since", of_cache, "--sort", "node_growth"), "there is no field node_growth"),
    ):
        runs.text(cores[0], *words, status=2)
        assert said in runs.said, words


def test_what_was_not_read_is_not_growth(
    runs: Runs, cores: tuple[str, str], tmp_path: Path
) -> None:
    """Neither zero nor growth: unknown, and the answer is not whole."""
    by = ("slabinfo", "--by", "cache")
    document = runs.document(cores[0], *by)
    document["whole"] = False
    row = next(r for r in document["tables"][0]["rows"] if r["cache"] == "dentry")
    row["bytes"], row["not_read"] = None, {"bytes": "lost"}
    file = tmp_path / "partial"
    file.write_text(json.dumps(document))
    text = runs.text(cores[0], *by, "--since", str(file), "--json", status=3)
    [table] = json.loads(text)["tables"]
    [found] = table["rows"]
    assert (found["cache"], found["bytes_growth"]) == ("dentry", None)
    assert found["not_read"] == {"bytes_growth": "lost"}
    assert "Not everything could be read" in runs.text(
        cores[0], *by, "--since", str(file), status=3
    )
