# SPDX-License-Identifier: LGPL-2.1-or-later
"""``--since``: what grew between two images, by files that a scene created in one of them."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from support.allocinfo import GUESTS, guest_image
from support.guest_files import still_current, still_slabinfo
from support.guests import ROOT, GuestImage, Lab
from support.missing_pages import filtered
from support.schemas import checked
from support.terminals import on_terminal

from memcg_inspect.cli import main

pytestmark = pytest.mark.image

#: What the scene leaves behind: files by memcg.
CREATED = {"/files/web": 2_000, "/leak": 300}
CLI = [sys.executable, "-m", "memcg_inspect"]
SCENE = str(ROOT / "fixtures/scenes/leak.sh")
REMADE = str(ROOT / "fixtures/scenes/remade.sh")


@pytest.fixture(scope="module")
def images(lab: Lab) -> tuple[GuestImage, GuestImage]:
    """Return an image, and one of the same machine with more files."""
    return lab.image("7.3", "2"), lab.image("7.3", "2", run=SCENE)


@pytest.fixture(scope="module")
def cores(images: tuple[GuestImage, GuestImage]) -> tuple[str, str]:
    return str(images[0].core), str(images[1].core)


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
    found = {
        tuple("?" if name in row.get("not_read", {}) else row.get(name) for name in names): row
        for row in table["rows"]
    }
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


#: Commands, the fields that tell rows apart, and amounts.
SUMS = (
    (("slabinfo", "--by", "cache,node"), ("cache", "node"), ("objects", "bytes", "charged")),
    (("slabinfo",), ("memcg", "cache"), ("objects", "bytes", "charged")),
    (("percpu", "--by", "memcg"), ("memcg",), ("count", "bytes", "charged", "node_0", "node_1")),
    (("percpu",), ("memcg", "nodes"), ("count", "bytes", "charged", "node_0", "node_1")),
    (("pages",), ("node", "zone", "kind"), ("pages", "bytes", "paid", "never", "unused")),
    (("pages", "--by", "memcg"), ("memcg",), ("bytes", "paid", "unpaid")),
    (("overview",), ("memcg",), ("current", "sum", "user", "slab", "percpu", "other", "dying")),
    (("overview", "--by-node"), ("memcg", "node"), ("sum", "user", "slab", "percpu")),
)


def plain_sums(document: dict[str, Any], keys: Any, names: Any) -> dict[Any, Counter[str]]:
    """Add up the rows of the first table, of which nothing is missing."""
    found = defaultdict[Any, Counter[str]](Counter)
    for row in document["tables"][0]["rows"]:
        assert "not_read" not in row
        found[tuple(row[key] for key in keys)].update({name: row[name] or 0 for name in names})
    return found


@pytest.mark.parametrize(("words", "keys", "names"), SUMS)
def test_growth_is_the_difference_of_rows(
    runs: Runs, cores: tuple[str, str], words: Any, keys: Any, names: Any
) -> None:
    """Of plain sums over the rows of both. Totals are sums of all rows, or those of the root."""
    then, now = (plain_sums(runs.document(core, *words), keys, names) for core in cores)
    grew = runs.document(cores[1], *words, "--since", runs.earlier(cores[0], *words))
    [table, *_] = grew["tables"]
    rows = {tuple(row[key] for key in keys): row for row in table["rows"]}
    assert len(rows) == len(table["rows"]) > 0
    total = Counter[str]()
    for key in then.keys() | now.keys():
        for name in names:
            expected = now[key][name] - then[key][name]
            row = rows.get(key)
            if row is not None and row[name] is not None:
                assert (row[name], row[f"{name}_growth"]) == (now[key][name], expected), key
            else:
                assert expected == 0, (key, name)
            if words[0] != "overview" or key[0] == "/":
                total[name] += expected
    for name in set(names) - {"current"}:  # which the root does not have
        assert table["totals"][f"{name}_growth"] == total[name], name


@pytest.mark.long
def test_memcgs_that_were_removed_and_made_again(
    lab: Lab, runs: Runs, images: tuple[GuestImage, GuestImage]
) -> None:
    """Amounts are what both guests read in ``memory.current``, whichever image is first."""
    before, after = images[0], lab.image("7.3", "2", run=REMADE)
    cores, names = (str(before.core), str(after.core)), ("/new", "/new/below", "/files/db")
    read = [{"/new": 0, "/new/below": 0, **still_current(before)}, still_current(after)]
    # CPUs may give back what they had charged in advance while the guest reads.
    same = [name for name in names if name in read[0] and name in read[1]]
    assert len(same) > 1
    for first, second in ((0, 1), (1, 0)):
        since = runs.earlier(cores[first], "overview")
        choice = ("--memcg", "/new", "--memcg", "/files/db", "--subtree")
        grew = runs.document(cores[second], "overview", *choice, "--since", since)
        found = {key[0]: row["current_growth"] for key, row in rows_of(grew).items()}
        assert found.keys() == set(names)
        assert (found["/new"] > found["/new/below"] > 0 > found["/files/db"]) == (second == 1)
        for name in same:
            assert found[name] == read[second][name] - read[first][name]
        # /new includes /new/below, also where both are gone.
        total = grew["tables"][0]["totals"]["current_growth"]
        assert total == found["/new"] + found["/files/db"]
    # What the removed memcgs paid for is their parent's.
    by = ("slabinfo", "--by", "memcg,cache")
    rows = rows_of(runs.document(cores[1], *by, "--since", runs.earlier(cores[0], *by)))
    inodes = {key[0]: row["objects_growth"] for key, row in rows.items() if "shmem" in key[1]}
    inodes.pop(None, None)
    assert inodes == {
        "/new": 50, "/new/below": 200, "/files": 1_500, "/files/db": 100 - 1_500,
    }  # fmt: skip


def test_growth_is_what_the_guests_read(
    runs: Runs, images: tuple[GuestImage, GuestImage], cores: tuple[str, str]
) -> None:
    """The files of both guests, which were copied before they were frozen."""

    def compared(then: dict[str, int], now: dict[str, int], field: str, *words: str) -> int:
        grew = runs.document(cores[1], *words, "--since", runs.earlier(cores[0], *words))
        key = "cache" if words[0] == "slabinfo" else "memcg"
        found = {row[key]: row[f"{field}_growth"] for row in grew["tables"][0]["rows"]}
        expected = {name: now[name] - then[name] for name in then.keys() & now.keys()}
        wrong = {name for name, growth in expected.items() if found.get(name, 0) != growth}
        # What stood still for seconds may be freed a moment before the freeze.
        assert len(wrong) <= len(expected) // 20, wrong
        return sum(growth != 0 for name, growth in expected.items() if name not in wrong)

    before, after = (
        {cache: active for cache, (active, _) in still_slabinfo(image).items()} for image in images
    )
    assert compared(before, after, "objects", "slabinfo", "--by", "cache") > 3
    # /leak was made by the scene. Any of them may have moved while its guest was copied.
    before, after = map(still_current, images)
    compared({"/leak": 0, **before}, after, "current", "overview")


def test_growth_of_a_memcg_that_was_made(runs: Runs, cores: tuple[str, str]) -> None:
    """Its files are charged to it, and what CPUs charged in advance."""
    grew = rows_of(
        runs.document(cores[1], "overview", "--since", runs.earlier(cores[0], "overview"))
    )
    inodes = runs.document(cores[1], "slabinfo", "--by", "memcg,cache")
    row = rows_of(inodes)["/leak", "shmem_inode_cache", None]
    assert row["objects"] == CREATED["/leak"]
    assert grew["/leak", None, None]["current_growth"] >= row["bytes"]


def test_what_is_the_same_is_left_out(runs: Runs, cores: tuple[str, str]) -> None:
    before = runs.earlier(cores[0], "overview", "--by-node")
    grew = runs.document(cores[0], "overview", "--by-node", "--since", before)
    assert [table["rows"] for table in grew["tables"]] == [[]]
    assert any("neither grew nor shrank" in note for note in grew["notes"])
    assert [table["contents"] for table in grew["tables"]] == ["growth"]
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
        ): "is no document with tables",
        json.dumps(document).replace('"dentry"', '["dentry"]'): "is no document with tables",
        json.dumps({**document, "command": "percpu"}): "is of percpu, and not of slabinfo",
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
        ((*by, "--since", of_cache, "--memcg", "0x10"), "so --memcg 0x10 must be a path"),
        # Its rows are not all rows.
        (
            (*by, "--since", runs.earlier(cores[1], *by, "--since", of_cache)),
            "has other rows or columns",
        ),
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


def test_objects_that_no_memcg_pays_for_are_no_growth(runs: Runs, cores: tuple[str, str]) -> None:
    """``--by`` adds them. The columns are the same without."""
    charged, every = ("slabinfo",), ("slabinfo", "--by", "memcg,cache")
    columns = [
        {column["name"] for column in runs.document(cores[0], *words)["tables"][0]["columns"]}
        for words in (charged, every)
    ]
    assert columns[0] == columns[1]
    for then, now in ((charged, every), (every, charged), (charged, ("slabinfo", "--by", "cache"))):
        runs.text(cores[1], *now, "--since", runs.earlier(cores[0], *then), status=2)
        assert "has other rows or columns" in runs.said
    # Sums over rows that have more fields are the same.
    made = [
        runs.document(
            cores[1], "slabinfo", "--by", "cache", "--since", runs.earlier(cores[0], *words)
        )
        for words in (every, ("slabinfo", "--by", "cache"))
    ]
    for document in made:
        for row in document["tables"][0]["rows"]:
            del row["objects_growth"]  # not known of large kmallocs, but for some memcgs
    assert made[0]["tables"][0]["rows"] == made[1]["tables"][0]["rows"]


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_counters_and_references_are_not_compared(
    lab: Lab, runs: Runs, kernel: str, append: str
) -> None:
    core = str(guest_image(lab, kernel, append).core)
    counters, references = ("allocinfo",), ("allocinfo", "--by", "site")
    for then, now in ((counters, references), (references, counters)):
        runs.text(core, *now, "--since", runs.earlier(core, *then), status=2)
        assert "has other rows or columns" in runs.said
    for words in (counters, references, (*counters, "--all")):
        grew = runs.document(core, *words, "--since", runs.earlier(core, *counters[:1], *words[1:]))
        assert grew["tables"][0]["rows"] == []
    before = runs.earlier(core, *counters)
    for more in (("--overhead",), ("--format", "proc")):
        runs.text(core, "allocinfo", *more, "--since", before, status=2)
        assert "cannot be combined with each other, with --since" in runs.said


def test_rows_of_a_filtered_dump(
    runs: Runs, images: tuple[GuestImage, GuestImage], tmp_path: Path
) -> None:
    """What makedumpfile left out of one of the two is no growth of the other one."""
    words = ("slabinfo", "--by", "memcg,cache")
    whole_core, left = str(images[0].core), tmp_path / "kdump"
    filtered(images[0], left, 31)
    texts = [
        runs.text(core, *words, "--json", status=status)
        for core, status in ((whole_core, 0), (str(left), 3))
    ]
    whole, part = (rows_of(json.loads(text)) for text in texts)
    for number, core in ((0, str(left)), (1, whole_core)):
        file = tmp_path / "before"
        file.write_text(texts[number])
        grew = json.loads(runs.text(core, *words, "--since", str(file), "--json", status=3))
        found = rows_of(checked(grew))
        lost = {key: row for key, row in found.items() if (key in whole) is not (key in part)}
        # They are in both images, and could not be read in the filtered one.
        for row in lost.values():
            assert row["bytes_growth"] is None
            assert "bytes_growth" in row["not_read"]
        totals = grew["tables"][0]["totals"]
        assert (totals["bytes_growth"], grew["whole"]) == (None, False)
        [note] = [note for note in grew["notes"] if note.startswith("Not everything")]
        assert ("read now" in note) == (core == str(left))
    left.unlink()
