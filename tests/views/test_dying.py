# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Removed memcgs, compared with the files of the guest, the known actions of its workload, and the
kernel's reference counts.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from drgn import Object
from drgn.helpers.linux.slab import slab_object_info
from labkit import poke
from support.guests import (
    DEBIAN_KERNELS,
    KERNELS,
    GuestImage,
    Lab,
    series,
)
from support.schemas import checked
from support.sockets import protocol_of

from memcg_inspect.cli import main
from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.tables import Answer, NotRead, Value
from memcg_inspect.views import dying as view
from memcg_inspect.views.dying import KIND_ORDER, MOST_ROWS, dying

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

on_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_image = pytest.mark.parametrize(
    ("kernel", "workload"), [(k, w) for k in KERNELS for w in ("dying", "mixed")]
)

PAGE = 4096
#: Victims of fixtures/workloads/dying.c, by the number in their files' names; the last lives.
VICTIMS = [
    *("chain/middle/inner", "chain/middle/second", "chain/last"),
    *("family/a", "family/b", "family/c", "family/d", "again", "again"),
]
#: Of 150 files, every eighth is written to.
WRITTEN = range(0, 150, 8)

Row = dict[str, Value]


def answer_of(image: GuestImage) -> Answer:
    return _answer(image.core)


@lru_cache(maxsize=2 * len(KERNELS))
def _answer(core: Path) -> Answer:
    return dying(image_of(GuestImage(core).program()), most_files=1000)


def rows(answer: Answer, name: str) -> list[Row]:
    table = next(table for table in answer.tables if table.name == name)
    return [table.values(row) for row in table.rows]


def numbers(*values: Value) -> list[int]:
    assert all(isinstance(value, int) for value in values), values
    return [value for value in values if isinstance(value, int)]


def total(values: list[Value]) -> int:
    return sum(numbers(*values))


@each_image
def test_as_many_as_the_guest_counts(lab: Lab, kernel: str, workload: str) -> None:
    image = lab.image(kernel, "4", workload)
    paths = [str(row["memcg"]) for row in rows(answer_of(image), "dying")]
    folder = image.guest / "2/cgroup"
    counted = 0
    for file in folder.rglob("cgroup.stat"):
        said = dict(line.split() for line in file.read_text().splitlines())
        # A removed memcg counts at all those above it, whose paths its own begins with.
        above = f"/{file.parent.relative_to(folder)}/".replace("/./", "/")
        found = sum(path.startswith(above) for path in paths)
        assert (above, found) == (above, int(said["nr_dying_descendants"]))
        counted += found
    assert counted > 2 * len(paths) > 20


@each_image
def test_every_reference_is_explained(lab: Lab, kernel: str, workload: str) -> None:
    answer = answer_of(lab.image(kernel, "4", workload))
    assert answer.is_whole
    removed = rows(answer, "dying")
    assert len(removed) == (11 if workload == "dying" else 12)
    explained: Counter[Value] = Counter()
    kinds = set()
    for row in rows(answer, "left"):
        explained[row["memcg_address"]] += numbers(row["references"])[0]
        assert row["pins"] is (row["references"] != 0)
        if row["pins"]:
            kinds.add(row["kind"])
    for row in removed:
        assert (row["memcg"], row["unexplained"]) == (row["memcg"], 0)
        assert row["references"] == row["explained"] == explained[row["memcg_address"]]
        assert total([row["references"]]) > 0
    # Since 7.1 user pages hold an obj_cgroup, which is the parent's by now.
    user_pages = {"lru"} if kernel.startswith("6.") else set()
    # A timer of a socket may have uncharged memory after the removal: refill_stock().
    assert kinds - {"stock"} == {"child", "swap", "sock"} | user_pages
    # Before 6.7 the kernel does not tell: nothing is missing in the image.
    assert bool(answer.notes) is (series(kernel) == "6.1")
    assert all("which obj_cgroups a removed memcg had" in note for note in answer.notes)
    values = [
        v for table in answer.tables for row in table.rows for v in table.values(row).values()
    ]
    assert not any(isinstance(value, NotRead) for value in values)


@each_image
def test_files_are_those_that_were_written(lab: Lab, kernel: str, workload: str) -> None:
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    nodes: defaultdict[str, set[int]] = defaultdict(set)
    for row in rows(answer_of(lab.image(kernel, "4", workload)), "left"):
        if row["kind"] == "lru" and str(row["memcg"]).startswith("/dying/"):
            found[str(row["memcg"])][str(row["detail"])] += numbers(row["bytes"])[0]
            nodes[str(row["detail"])] |= set(numbers(row["node"]))
    assert set(found) == {f"/dying/{victim}" for victim in VICTIMS}
    for number, victim in enumerate(VICTIMS):
        files = found[f"/dying/{victim}"]
        for i in WRITTEN:
            file = f"/tmp/dying/{number}-{i}"
            # on the node that memory was bound to
            assert (file, files.pop(file), nodes[file]) == (file, PAGE, {(number + i // 16) % 4})
    for files in found.values():
        # Half of the shared memory was pushed out; the way out leads through the swap cache.
        assert files.pop("memfd:dying (deleted)") % (128 << 10) == 0
        # Pages of a process that is gone may still wait in a CPU's batch.
        assert set(files) <= {"(swap cache)", "(anonymous)"}


@each_image
def test_what_was_charged_is_still_told_apart(lab: Lab, kernel: str, workload: str) -> None:
    """A BPF array of 100000 bytes on a node of its own, and half of 256 KiB in zswap and swap."""
    answer = answer_of(lab.image(kernel, "4", workload))
    arrays: defaultdict[Value, list[tuple[Value, Value]]] = defaultdict(list)
    for row in rows(answer, "left"):
        if (row["kind"], row["detail"]) == ("kmem", "vmalloc"):
            arrays[row["memcg"]].append((row["node"], row["count"]))
    # Before 6.7 nothing tells whose they were: they are listed, for nobody.
    if series(kernel) == "6.1":
        assert set(arrays) == {None}
        nodes = Counter(node for node, count in arrays[None] for _ in range(total([count]) // 25))
        assert nodes == Counter((number + 1) % 4 for number in range(len(VICTIMS)))
    else:
        expected: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, victim in enumerate(VICTIMS):
            expected[f"/dying/{victim}"].append(((number + 1) % 4, 25))
        assert {p: sorted(map(tuple, a)) for p, a in arrays.items()} == {
            p: sorted(a) for p, a in expected.items()
        }
    for row in rows(answer, "dying"):
        if str(row["memcg"]).removeprefix("/dying/") in VICTIMS:
            assert row["swap"] == 32 * PAGE
            kept = [row["slab"], row["kmem"], row["percpu"]]
            if series(kernel) == "6.1":
                assert [*kept, row["zswap"]] == [None] * 4
            else:
                assert min(numbers(*kept)) > 0


@on_kernel
def test_totals_are_those_of_the_rows(lab: Lab, kernel: str) -> None:
    answer = answer_of(lab.image(kernel, "4", "mixed"))
    sums: Counter[tuple[Value, Value]] = Counter()
    for row in rows(answer, "left"):
        sums[row["memcg_address"], row["kind"]] += total([row["bytes"] or 0])
    for row in rows(answer, "dying"):
        for kind in ("lru", "kmem", "slab", "percpu", "zswap", "sock", "swap"):
            if row[kind] is not None:
                assert row[kind] == sums[row["memcg_address"], kind], (row["memcg"], kind)


@each_image
def test_the_summary_adds_up_what_is_left(lab: Lab, kernel: str, workload: str) -> None:
    answer = answer_of(lab.image(kernel, "4", workload))
    left, summary = rows(answer, "left"), rows(answer, "summary")
    for what in ("references", "count", "bytes"):
        for kind in {row["kind"] for row in left}:
            of_rows = [sum(numbers(r[what] or 0)[0] for r in t if r["kind"] == kind)
                       for t in (left, summary)]  # fmt: skip
            assert of_rows[0] == of_rows[1], (what, kind)
    for row in summary:
        if row["bytes"] is not None and row["memcgs"]:
            memcgs, size, least, most = numbers(
                row["memcgs"], row["bytes"], row["least"], row["most"]
            )
            assert memcgs * least <= size <= memcgs * most
    # All victims but one, which lives, had one socket of each sort, and 32 pages in swap.
    swap = [row for row in summary if row["kind"] == "swap"]
    assert sum(numbers(row["memcgs"])[0] for row in swap) == len(VICTIMS)
    assert {(row["least"], row["most"], row["pins"]) for row in swap} == {
        (32 * PAGE, 32 * PAGE, True)
    }
    assert len(summary) <= MOST_ROWS + 2 * len(KIND_ORDER)


@on_kernel
def test_linear_in_what_is_left(lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all holders are looked at for each memcg: there may be thousands of both."""
    looks = 0

    class Counting(view.Holder):
        @property
        def memcg(self) -> int | None:
            nonlocal looks
            looks += 1
            return self[0]

    monkeypatch.setattr(view, "Holder", Counting)
    answer = dying(image_of(lab.image(kernel, "4", "dying").program()))
    assert len(rows(answer, "dying")) == 11
    assert looks <= 6 * len(rows(answer, "left"))


class Reads:
    """
    Count what is read of an image.

    :ivar calls: reads of kernel memory
    :ivar bytes: bytes that they return
    """

    def __init__(self, image: GuestImage) -> None:
        self.calls = self.bytes = 0
        self.prog, self._whole = image.own_program(), image.program()
        self.prog.add_memory_segment(1 << 63, 1 << 63, self._read)

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        self.calls += 1
        self.bytes += count
        return self._whole.read(address, count)


@pytest.mark.parametrize(
    ("fewer", "more"), [(100, 250), pytest.param(400, 1000, marks=pytest.mark.long)]
)
def test_thousands_of_removed_memcgs(lab: Lab, fewer: int, more: int) -> None:
    """What dying reads grows with the memcgs, and is at most three times what the audit reads."""
    counts: dict[int, tuple[int, int]] = {}
    for number in (fewer, more):
        image = lab.image("7.3", "1", "removed", append=f"removed={number}")
        reads, audit_reads = Reads(image), Reads(image)
        answer = dying(image_of(reads.prog))
        assert audit(image_of(audit_reads.prog)).verdict == "exact"
        assert len(rows(answer, "dying")) == number
        assert {row["unexplained"] for row in rows(answer, "dying")} == {0}
        assert reads.calls <= 3 * audit_reads.calls
        assert reads.bytes <= 3 * audit_reads.bytes
        counts[number] = reads.calls, audit_reads.calls
    for least, most in zip(counts[fewer], counts[more], strict=True):
        # The rest of the machine is read once, and is the same in both guests.
        assert most - least <= 1.2 * (more - fewer) / fewer * least


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_one_screen_first_and_each_memcg_on_request(
    lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    core = str(lab.image(kernel, "4", "dying").core)
    said = []
    for more in ([], ["--each"], ["--memcg", "/dying/family/a"], ["--sort", "memcgs"]):
        assert main(["dying", "-c", core, "--debuginfo", "btf", *more]) == 0
        said.append(capsys.readouterr().out)
    summary, each, one, by_number = said
    assert summary.startswith("what 11 removed memcgs have left behind\n")
    assert "--each shows each memcg" in summary
    assert by_number.startswith("what 11 removed memcgs have left behind\n")
    assert len(summary.splitlines()) < 50
    for text in (each, one):
        assert text.startswith("removed memcgs that still exist\n")
        assert "/dying/family/a" in text
    assert "/dying/family/b" in each
    assert "/dying/family/b" not in one


@on_kernel
def test_examples_are_charged_to_it(lab: Lab, kernel: str) -> None:
    """Read one by one, with nothing but the types."""
    image = lab.image(kernel, "4", "mixed")
    prog = image.program()
    seen: Counter[Value] = Counter()
    for row in rows(answer_of(image), "left"):
        for word in str(row["examples"] or "").split():
            seen[row["kind"]] += 1
            address, memcg = int(word, 0), row["memcg_address"]
            if row["kind"] == "sock":
                sock = Object(prog, "struct sock *", address)
                assert sock.sk_memcg.value_() == memcg
                assert row["detail"] == protocol_of(sock)
            elif row["kind"] == "zswap":
                entry = Object(prog, "struct zswap_entry *", address)
                assert entry.objcg.value_() == row["objcg"]
            elif row["kind"] == "child":
                assert Object(prog, "struct mem_cgroup *", address).css.parent.value_() == memcg
    # 6.x still has in the swap cache what was pushed out.
    kinds = {"sock", "child", "slab", "kmem", "lru"} | ({"zswap"} if kernel[0] == "7" else set())
    assert min(seen[kind] for kind in kinds) > 2


def poked(image: GuestImage, folder: Path, place: Object, value: int) -> Path:
    out = folder / "poked.core"
    poke.poke(image.core, out, image.vmlinux, [(f"u64:{place.address_:#x}", value)])
    return out


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, Any]:
    status = main(["dying", "--json", "--debuginfo", "btf", *map(str, args)])
    return status, checked(json.loads(capsys.readouterr().out))


def first_removed(image: GuestImage, path: str) -> Object:
    row = next(row for row in rows(answer_of(image), "dying") if row["memcg"] == path)
    return Object(image.program(), "struct mem_cgroup *", total([row["memcg_address"]]))


@on_kernel
def test_leaked_reference_is_unexplained(
    lab: Lab, kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = lab.image(kernel, "4", "dying")
    memcg = first_removed(image, "/dying/family/a")
    count = memcg.css.refcnt.data.count.counter
    path = poked(image, tmp_path, count, count.value_() + 3)
    status, document = run(capsys, "-c", path)
    left = {row["memcg"]: row["unexplained"] for row in document["tables"][0]["rows"]}
    assert status == 0
    assert {memcg: n for memcg, n in left.items() if n} == {"/dying/family/a": 3}
    assert any("leaked" in note for note in document["notes"])
    path.unlink()


@on_kernel
def test_references_that_cannot_be_read_are_not_0(
    lab: Lab, kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = lab.image(kernel, "4", "dying")
    memcg = first_removed(image, "/dying/family/b")
    path = poked(image, tmp_path, memcg.css.refcnt.data, 0xDEAD000000000000)
    status, document = run(capsys, "-c", path, "--memcg", "/dying/family/b")
    (row,) = document["tables"][0]["rows"]
    assert status == 3
    assert (row["references"], row["unexplained"], row["swap"]) == (None, None, None)
    assert {"references", "unexplained", "swap"} <= set(row["not_read"])
    assert document["coverage"]["css"]["unreadable"] == 1
    path.unlink()


@on_kernel
def test_what_may_hold_more_is_not_unexplained(
    lab: Lab, kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slab of sockets that cannot be read may hold what is missing."""
    image = lab.image(kernel, "4", "dying")
    row = next(
        row
        for row in rows(answer_of(image), "left")
        if (row["kind"], row["detail"]) == ("sock", "TCP") and row["examples"]
    )
    sock = int(str(row["examples"]).split()[0], 0)
    info = slab_object_info(image.program(), sock)
    assert info is not None
    path = poked(image, tmp_path, info.slab.slab_cache, 0xDEAD000000000000)
    status, document = run(capsys, "-c", path)
    (found,) = [
        other
        for other in document["tables"][0]["rows"]
        if other["memcg_address"] == f"{row['memcg_address']:#x}"
    ]
    assert status == 3
    assert (found["sock"], found["unexplained"]) == (None, None)
    assert found["references"] > found["explained"]
    assert not any("leaked" in note for note in document["notes"])
    path.unlink()


@pytest.mark.long
def test_leak_of_a_broken_kernel(lab: Lab) -> None:
    """fixtures/patches/7.3-pernode-broken: one reference is taken at each removal, for ever."""
    kernel = "7.3-pernode-broken-reparent-forgotten-node"
    answer = answer_of(lab.image(kernel, "2cpu+6mem", "interleave"))
    removed = rows(answer, "dying")
    assert len(removed) > 10
    assert {row["unexplained"] for row in removed} == {1}
    assert any("leaked" in note for note in answer.notes)


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_no_removed_memcg(lab: Lab, kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run(capsys, "-c", lab.image(kernel, "4", "pages").core)
    assert status == 0
    assert [table["rows"] for table in document["tables"]] == [[], [], []]
