# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The five questions of docs/questions.md, on images of real kernels.

Each is asked with one or two commands, on terminals of three widths and in a pipe. The answer must
fit on one screen, and say what the guest's own files or its workload say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from drgn import Program
from support.allocinfo import GUESTS
from support.findings import by_path
from support.guest_files import numbers, still, still_current
from support.guests import ROOT, GuestImage, Lab, Plant
from support.screens import HEIGHT, WIDTHS, check_screen, run, tables

from memcg_inspect.cli import main
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader

pytestmark = pytest.mark.image

KERNEL = "7.3"
PAGE = 4096
#: Files of each memcg of fixtures/workloads/files.c.
FILES = 1_500


def asked(core: Path, *words: str, status: int = 0) -> tuple[str, list[str]]:
    """Ask a question; return its answer in a pipe, and on terminals of all widths."""
    [[piped]] = run(str(core), [words], status=status)
    assert len(piped.splitlines()) <= HEIGHT
    ways = [(width, option) for width in WIDTHS for option in ([], ["--exact"])]
    [shown] = run(str(core), [words], *ways, status=status)
    for (width, option), text in zip(ways, shown, strict=True):
        check_screen(text, width, piped, bool(option))
    return piped, shown


def rows(text: str, table: int = 0) -> list[dict[str, str]]:
    """Return the rows of a table in a pipe."""
    columns, lines = tables(text)[table]
    cells = [re.split(" {2,}", line.strip()) for line in lines]
    return [dict(zip(columns, line, strict=True)) for line in cells if len(line) == len(columns)]


def amount(text: str) -> int:
    return int(text.replace(",", ""))


def in_kfence(prog: Program, cache: str) -> int:
    """Return how many objects of a cache KFENCE has handed out. It has 255 objects here."""
    metadata = (prog["kfence_metadata"][number] for number in range(255))
    caches = [object_.cache for object_ in metadata if object_.cache]
    return sum(found.name.string_() == cache.encode() for found in caches)


def first_words(shown: Sequence[str]) -> set[str]:
    """Return the first cell of the first row of the first table, on each terminal."""
    return {tables(text)[0][1][0].split()[0] for text in shown}


def test_who_uses_the_slab_memory_of_a_node(lab: Lab) -> None:
    image = lab.image(KERNEL, "4", "mixed")
    piped, shown = asked(image.core, "slabinfo", "--node", "2", "--by", "memcg", "--top", "10")
    # memory.numa_stat includes the memcgs below, so compare those that have none.
    said = numbers(image.guest / "2/cgroup", "memory.numa_stat")
    paths = {path for path, _, _ in said}
    leaves = {p for p in paths if p != "/" and not any(q.startswith(f"{p}/") for q in paths)}
    items = ("slab_reclaimable", "slab_unreclaimable")
    sizes = {path: sum(said[path, item, 2] for item in items) for path in leaves}
    listed = [row["memcg"] for row in rows(piped) if row["memcg"] in leaves]
    most = max(sizes, key=lambda path: sizes[path])
    assert sizes[most] > 500_000
    assert listed[0] == most
    assert first_words(shown) == {"-"}
    assert all(most.rpartition("/")[2] in text for text in shown)
    assert re.search(r"\(\d+ other rows\)", piped)

    words = ("slabinfo", "--node", "2", "--memcg", most, "--by", "cache", "--top", "4")
    piped, shown = asked(image.core, *words)
    objects = {row["cache"]: amount(row["objects"]) for row in rows(piped)}
    assert objects["shmem_inode_cache"] >= FILES * 0.9
    assert first_words(shown) == {most} or all("shmem_inode_cache" in text for text in shown)


def test_why_memory_current_does_not_match(lab: Lab) -> None:
    image = lab.image(KERNEL, "4", "mixed")
    current, stats = still_current(image), still(image, "memory.stat")
    terms = {
        "slab objects": ("slab_reclaimable", "slab_unreclaimable"),
        "percpu memory": ("percpu",),
        "kernel stacks": ("kernel_stack",),
        "page tables": ("pagetables",),
        "sockets": ("sock",),
    }
    items = [item for some in terms.values() for item in some]
    # Of one that was charged or uncharged between the copies, nothing is known of the freeze.
    path = next(
        path
        for path in (f"/files/{name}" for name in ("web", "db", "mail", "build"))
        if path in current and all((path, item, None) in stats for item in items)
    )
    piped, shown = asked(image.core, "usage", path)
    found = {row["what"]: row for row in rows(piped)}
    assert amount(found["memory.current"]["bytes"]) == current[path]
    assert found["not found"]["bytes"] == "0"
    parts = [row for what, row in found.items() if what not in ("memory.current", "not found")]
    assert sum(amount(row["bytes"]) for row in parts) == current[path]
    for what, some in terms.items():
        read = amount(found[what]["memory_stat"]) + amount(found[what]["not_folded"])
        assert read == sum(stats[path, item, None] for item in some), what
    for text in shown:
        assert text.startswith(f"memory.current of {path}\n")
        assert [line.strip().split("  ")[0] for line in tables(text)[0][1]] == list(found)


def test_what_keeps_removed_memcgs(lab: Lab) -> None:
    """Of fixtures/workloads/removed.c: each has left a socket, and a page of one file."""
    image = lab.image(KERNEL, "1", "removed", append="removed=1000")
    said = (image.guest / "2/cgroup/cgroup.stat").read_text()
    number = int(dict(line.split() for line in said.splitlines())["nr_dying_descendants"])
    assert number == 1_000
    piped, shown = asked(image.core, "dying")
    assert piped.startswith(f"what {number:,} removed memcgs have left behind\n")
    [sock] = [row for row in rows(piped) if row["kind"] == "sock"]
    assert sock["memcgs"] == sock["references"] == f"{number:,}"
    assert (sock["pins"], sock["detail"], sock["paid_by"]) == ("yes", "UNIX-STREAM", "/removed")
    [page] = [row for row in rows(piped) if row["detail"] == "/tmp/removed/x.log"]
    assert page["memcgs"] == page["count"] == f"{number:,}"
    assert page["kind"] == "lru"
    assert amount(page["bytes"]) == number * PAGE
    assert {page["least"], page["most"]} == {f"{PAGE:,}"}
    # What holds them is in the first line, on each terminal.
    assert first_words(shown) == {f"{number:,}"}
    assert all("sock" in tables(text)[0][1][0] and "/x.log" in text for text in shown)


@pytest.mark.parametrize(("kernel", "append"), GUESTS[:1])
def test_which_line_leaks(lab: Lab, kernel: str, append: str) -> None:
    image = lab.image(kernel, "4", "mixed", append=append)
    words = ("allocinfo", "--by", "memcg,site", "--memcg", "/files/web", "--top", "8")
    piped, shown = asked(image.core, *words)
    found = {row["function"]: row for row in rows(piped)}
    # On 7.3, objects that KFENCE hands out have no call site, and no counter has them.
    counted = amount(found["shmem_alloc_inode"]["calls"])
    assert FILES - in_kfence(image.program(), "shmem_inode_cache") <= counted <= FILES
    assert re.fullmatch(r"mm/shmem\.c:\d+", found["shmem_alloc_inode"]["site"])
    assert all("mm/shmem.c" in text for text in shown)


def test_which_cache_grows(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without allocation profiling: fixtures/scenes/leak.sh has created files in between."""
    before = lab.image(KERNEL, "2")
    after = lab.image(KERNEL, "2", run=str(ROOT / "fixtures/scenes/leak.sh"))
    words = ("slabinfo", "--by", "memcg,cache")
    assert main([*words, "--json", "-c", str(before.core), "--debuginfo", "btf"]) == 0
    (tmp_path / "before.json").write_text(capsys.readouterr().out)
    earlier = str(tmp_path / "before.json")
    piped, shown = asked(after.core, *words, "--since", earlier, "--top", "5")
    grown = {(row["memcg"], row["cache"]): row["objects_growth"] for row in rows(piped)}
    assert grown["/files/web", "shmem_inode_cache"] == "+2,000"
    assert grown["/leak", "shmem_inode_cache"] == "+300"
    assert first_words(shown) == {"/files/web"}


def test_is_the_accounting_right(lab: Lab, plant: Plant) -> None:
    image = lab.image(KERNEL, "4", "mixed")
    piped, shown = asked(image.core, "audit")
    for text in (piped, *shown):
        assert text.startswith("EXACT: ")
        assert len(text.splitlines()) < 12

    [core] = planted(image, plant)
    piped, shown = asked(core, "audit", status=1)
    for text in (piped, *shown):
        assert text.startswith("FINDINGS: ")
        assert "/files/web" in text
        assert "node 1" in text
        assert re.search(r"^ +\$ memcg-inspect \w+ ", text, re.MULTILINE)
        assert len(text.splitlines()) <= 40


def planted(image: GuestImage, plant: Plant) -> list[Path]:
    """Return a copy of an image in which a counter of a memcg is wrong."""
    item = "NR_SLAB_UNRECLAIMABLE_B"
    web = by_path(image.report())["/files/web"]
    slot = StatReader(image_of(image.program()), [item]).slots[item]
    stats = f"Object(prog, 'struct mem_cgroup *', {web}).nodeinfo[1].lruvec_stats"
    plant(image, (f"{stats}.state[{slot}]", "old + 1000003"))
    return plant.made
