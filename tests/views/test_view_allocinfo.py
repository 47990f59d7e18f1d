# SPDX-License-Identifier: LGPL-2.1-or-later
"""``allocinfo`` is compared with the guest's file, the allocations of a module, and its cost."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from drgn import Object, Program, TypeKind
from drgn.helpers.linux.list import list_for_each_entry
from drgn.helpers.linux.mm import for_each_page, page_to_virt
from labkit import poke
from support.allocinfo import GUESTS, check_against_guest, guest_image, parse, said
from support.charge_module import CPUS, PAGE, call_sites, groups, held
from support.charge_module import GUESTS as CHARGED
from support.charge_module import guest_image as charged_image
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, GuestImage, Lab

from memcg_inspect.checks.identities.alloc_tags import alloc_tag_rows
from memcg_inspect.cli import main
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.model import ImageError
from memcg_inspect.tables import Answer
from memcg_inspect.views.allocinfo import (
    DIMENSIONS,
    allocinfo,
    allocinfo_by,
    allocinfo_overhead,
    allocinfo_proc,
)

pytestmark = pytest.mark.image


def dicts(answer: Answer, table: int = 0) -> list[dict[str, Any]]:
    return [answer.tables[table].values(row) for row in answer.tables[table].rows]


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_the_file_of_the_kernel_byte_for_byte(lab: Lab, kernel: str, append: str) -> None:
    image = guest_image(lab, kernel, append)
    text = allocinfo_proc(image_of(image.program())).text
    assert text is not None
    theirs = (image.guest / "2/proc/allocinfo").read_text().splitlines(keepends=True)
    (version, found), copies = parse(text), [said(image, when) for when in (1, 2, 3)]
    assert {version, *(version for version, _ in copies)} == {
        "1.0" if kernel.startswith("6.12") else "2.0"
    }
    check_against_guest(found, [lines for _, lines in copies])
    # A line that says the same is the same, to the last blank.
    lines, second = text.splitlines(keepends=True), copies[1][1]
    assert len(lines) == len(theirs)
    same = [
        mine == line
        for mine, line, a, b in zip(lines[2:], theirs[2:], found, second, strict=True)
        if a == b
    ]
    assert lines[:2] == theirs[:2]
    assert all(same)
    assert len(same) > 1600


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_table_is_the_file_sorted(lab: Lab, kernel: str, append: str) -> None:
    prog = guest_image(lab, kernel, append).program()
    _, lines = parse(allocinfo_proc(image_of(prog)).text or "")
    for everything in (False, True):
        rows = dicts(allocinfo(image_of(prog), everything))
        expected = Counter(
            (line.bytes, line.calls, f"{line.file}:{line.line}", line.module, line.function)
            for line in lines
            if everything or line.bytes or line.calls
        )
        columns = ("bytes", "calls", "site", "module", "function")
        assert Counter(tuple(row[c] for c in columns) for row in rows) == expected
        assert [row["bytes"] for row in rows] == sorted((r["bytes"] for r in rows), reverse=True)
    marked = [row["site"] for row in rows if not row["accurate"]]
    assert sorted(marked) == sorted(f"{s.file}:{s.line}" for s in lines if not s.accurate)


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_every_way_to_add_up_has_the_same_total(lab: Lab, kernel: str, append: str) -> None:
    prog = guest_image(lab, kernel, append).program()
    totals = set()
    for by in (*DIMENSIONS, ("memcg", "node", "kind", "site"), ("memcg", "node")):
        answer = allocinfo_by(image_of(prog), [by] if isinstance(by, str) else by)
        assert answer.is_whole
        rows = dicts(answer)
        keys = [tuple(v for n, v in row.items() if n not in ("bytes", "calls")) for row in rows]
        assert len(set(keys)) == len(keys) > 3
        totals.add((sum(row["bytes"] for row in rows), sum(row["calls"] for row in rows)))
    by_site = {row["codetag"]: (row["bytes"], row["calls"]) for row in dicts(
        allocinfo_by(image_of(prog), ["site"]))}  # fmt: skip
    counted = {
        row["codetag"]: (row["bytes"], row["calls"]) for row in dicts(allocinfo(image_of(prog)))
    }
    assert by_site == counted
    assert totals == {tuple(map(sum, zip(*counted.values(), strict=True)))}


Key = tuple[str | None, int | None, str]  # memcg, node, site


def expected(kernel: str, image: GuestImage) -> dict[Key, tuple[int, int]]:
    """
    Return bytes and calls by key, with node ``None`` for what may be on any node: percpu memory and
    slab objects for which the caller names no node.
    """
    sites = call_sites()
    total: defaultdict[Key, list[int]] = defaultdict(lambda: [0, 0])

    def add(path: str | None, nid: int | None, kind: str, size: int, calls: int) -> None:
        total[path, nid, sites[kind]][0] += size
        total[path, nid, sites[kind]][1] += calls

    for path, group in groups(kernel).items():
        for order in group.orders:
            kind, first, second, count = order.line.split()
            number = int(count)
            if kind == "kmalloc":
                size = 1 << (int(second) - 1).bit_length()
                add(path, int(first), kind, size * number, number)
            elif kind == "cache":
                add(path, int(first), kind, 200 * number, number)
            elif kind in ("pages", "block"):
                add(path, int(first), kind, (PAGE << int(second)) * number, number)
            elif kind == "vmalloc":
                pages = -(-int(second) // PAGE) * number
                add(path, group.nid, kind, pages * PAGE, pages)
                # An area lists its 25 pages in an array, which nobody is charged for.
                add(None, None, kind, 256 * number, number)
            else:
                add(path, None, kind, int(first) * (CPUS + 2) * number, number)
    add(None, None, "held", 64 * len(held(image)), len(held(image)))
    return {key: (size, calls) for key, (size, calls) in total.items()}


@pytest.mark.parametrize(("kernel", "append"), [g for g in CHARGED if "profiling" in g[1]])
def test_join_has_what_a_module_allocated(
    lab: Lab, kernel: str, append: str, tmp_path: Path
) -> None:
    """Seven call sites, two memcgs and the requested nodes, to the byte."""
    image = charged_image(lab, kernel, append, tmp_path)
    rows = dicts(allocinfo_by(image_of(image.program()), ["memcg", "node", "site"]))
    found: defaultdict[Key, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        if row["module"] != "charge":
            continue
        site = Path(row["site"]).name
        anywhere = site in (call_sites()["percpu"], call_sites()["held"])
        anywhere |= (row["memcg"], site) == (None, call_sites()["vmalloc"])
        key = row["memcg"], None if anywhere else row["node"], site
        found[key][0] += row["bytes"]
        found[key][1] += row["calls"]
        assert row["function"] == ("make" if site == call_sites()["held"] else "allocate")
    assert {key: tuple(amount) for key, amount in found.items()} == expected(kernel, image)
    percpu = {
        row["node"]: row["bytes"]
        for row in rows
        if (row["memcg"], Path(row["site"]).name) == ("/few", call_sites()["percpu"])
    }
    assert sum(percpu.values()) == PAGE * (CPUS + 2)
    assert all(percpu[nid] >= PAGE for nid in range(CPUS))
    assert image.report().verdict == "exact"


@pytest.mark.parametrize(("kernel", "append"), GUESTS[:1])
def test_rows_of_one_memcg_and_node(
    lab: Lab, kernel: str, append: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = guest_image(lab, kernel, append)
    every = dicts(allocinfo_by(image_of(image.program()), ["memcg", "node", "site"]))
    wanted = [row for row in every if row["memcg"] == "/files/web" and row["node"] == 0]
    options = ["--memcg", "/files/web", "--node", "0", "--fields", "bytes,calls,site", "--scripted"]
    status = main(["allocinfo", "-c", str(image.core), "--debuginfo", "btf", *options])
    assert status == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(wanted) > 3
    assert lines == [[str(r["bytes"]), str(r["calls"]), r["site"]] for r in wanted]


def walked(prog: Program) -> dict[str, int]:
    """Return the cost of profiling, by plain walks with debug info."""
    cpus = prog["nr_cpu_ids"].value_()
    start, stop = (prog.symbol(f"__{end}_alloc_tags").address for end in ("start", "stop"))
    tags = (stop - start) // 40
    slabs: Counter[bool] = Counter()
    for page in for_each_page(prog):
        if page.page_type.value_() >> 24 != prog["PGTY_slab"].value_():
            continue
        slab = Object(prog, "struct slab *", page.value_())
        vector = slab.obj_exts.value_() & ~7
        if not vector:
            continue
        first = page_to_virt(page).value_()
        # No slab has more than 8 pages.
        inside = first <= vector < first + 8 * PAGE and is_inside(prog, page, vector - first)
        slabs[inside] += slab.objects.value_()
    units = sum(
        chunk.nr_pages.value_() * PAGE // 4
        for slot in range(prog["pcpu_nr_slots"].value_())
        for chunk in list_for_each_entry(
            "struct pcpu_chunk", prog["pcpu_chunk_lists"][slot].address_of_(), "list"
        )
        if chunk.obj_exts
    )
    ext = prog.variable("total_usage", "mm/page_ext.c").value_()
    return {
        "tags": tags * 40,
        "counters": tags * 16 * cpus,
        "page_ext": ext,
        "slab_exts": slabs[False] * 8,
        "slab_exts_inside": slabs[True] * 8,
        "percpu_exts": units * 8,
    }


def flags_of(page: Object) -> int:
    flags = page.flags
    return int(flags.f if flags.type_.unaliased_kind() == TypeKind.STRUCT else flags)


def is_inside(prog: Program, page: Object, offset: int) -> bool:
    is_head = flags_of(page) >> prog["PG_head"].value_() & 1
    order = flags_of(page + 1) & 0xFF if is_head else 0
    return offset < PAGE << order


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_overhead_is_what_plain_walks_find(lab: Lab, kernel: str, append: str) -> None:
    image = guest_image(lab, kernel, append)
    rows = dicts(allocinfo_overhead(image_of(image.program())))
    assert {row["part"]: row["overhead"] for row in rows} == walked(image.program(dwarf=True))
    said = (image.guest / "2/proc/meminfo").read_text()
    memory = int(re.findall(r"MemTotal: +(\d+)", said)[0])
    for row in rows:
        assert row["share"] == row["overhead"] / (memory << 10)
    assert (rows[2]["overhead"] == 0) == ("compressed" in append)


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
@pytest.mark.parametrize("options", [[], ["--by", "memcg"], ["--format", "proc"], ["--overhead"]])
def test_kernels_without_it_say_so(
    lab: Lab, kernel: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    core = str(lab.image(kernel, "4", "mixed").core)
    assert main(["allocinfo", "-c", core, "--debuginfo", "btf", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "without CONFIG_MEM_ALLOC_PROFILING" in err


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k in ("6.12-lab", "7.3-lab")])
def test_profiling_that_is_off(lab: Lab, kernel: str) -> None:
    """6.12 keeps the call sites, all at zero; 7.3 has none."""
    prog = lab.image(kernel, "4", "mixed").program()
    with pytest.raises(ImageError, match="profiling"):
        allocinfo_by(image_of(prog), ["site"])
    if kernel == "7.3-lab":
        with pytest.raises(ImageError, match="not booted with allocation profiling"):
            allocinfo(image_of(prog))
    else:
        assert {row["bytes"] for row in dicts(allocinfo(image_of(prog), everything=True))} == {0}
        assert dicts(allocinfo(image_of(prog))) == []
        assert any("was off" in note for note in allocinfo(image_of(prog)).notes)
    snapshot = collect(image_of(prog))
    assert alloc_tag_rows(snapshot) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--by", "size"],
        ["--format", "proc", "--by", "site"],
        ["--format", "proc", "--fields", "bytes"],
        ["--format", "proc", "--sort", "bytes"],
        ["--format", "proc", "--json"],
        ["--format", "proc", "--scripted"],
        ["--format", "proc", "--all"],
        ["--overhead", "--all"],
        ["--by", "site", "--all"],
    ],
)
def test_what_does_not_go_together_is_refused(
    lab: Lab, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # On any kernel: it is refused before anything is read.
    core = str(lab.image("7.3", "4", "files").core)
    try:
        status = main(["allocinfo", "-c", core, "--debuginfo", "btf", *options])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(("kernel", "append"), GUESTS[:1])
def test_names_are_escaped(
    lab: Lab, kernel: str, append: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name with escapes that would overwrite the line above."""
    image = guest_image(lab, kernel, append)
    prog = image.program()
    tag = next(row for row in dicts(allocinfo(image_of(prog))) if row["function"] == "alloc_pid")[
        "codetag"
    ]
    name = prog.read(tag + prog.type("struct codetag").member("function").offset, 8)
    core = tmp_path / "core"
    change = (int.from_bytes(name, "little"), b"\x1b[A\nx")
    poke.poke(image.core, core, image.vmlinux, [change])
    outputs = []
    for options in (
        ["--format", "proc"],
        ["--by", "site", "--top", "0"],
        ["--scripted"],
        ["--json"],
    ):
        assert main(["allocinfo", "-c", str(core), "--debuginfo", "btf", *options]) == 0
        outputs.append(capsys.readouterr().out)
    core.unlink()
    assert not any("\x1b" in output for output in outputs)
    assert all("[A" in output for output in outputs)
    assert len(outputs[0].splitlines()) == len(allocinfo(image_of(prog), True).tables[0].rows) + 2
