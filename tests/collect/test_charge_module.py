# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What a test module plants is what is found: to the byte, on its node, at its address.

The module (``fixtures/modules/charge``) makes charges in memcgs that hold nothing else, so
everything that the ledger says of them is plain arithmetic. It also lists the address of
each charge, in a file of its own that the guest hands over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from support.guests import BUILT_KERNELS, ROOT, Image, Lab

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.mm.vmalloc import vm_areas
from memcg_inspect.model import Coverage

MODULE = (str(ROOT / "fixtures" / "modules" / "charge"), "")
#: Kernel and its options; allocation profiling puts tags between the pointers.
GUESTS = [
    (kernel, append)
    for kernel, append in (
        ("6.12-lab", ""),
        ("7.3-lab", ""),
        ("6.12-lab", "sysctl.vm.mem_profiling=1"),
        ("7.3-lab", "sysctl.vm.mem_profiling=1"),
        ("7.3-lab", "sysctl.vm.mem_profiling=1,compressed"),
    )
    if kernel in BUILT_KERNELS
]
CPUS = 4  # on nodes 0 to 3, one each
PAGE = 4096
POINTER = 8
#: kfence would take an object out of its slab now and then.
NO_KFENCE = "kfence.sample_interval=0"

pytestmark = pytest.mark.image


class Order(NamedTuple):
    """
    What one line asks of the module.

    :ivar expected: bytes in all, by (kind, detail, node); node ``None`` where any may be
    """

    line: str
    count: int
    expected: dict[tuple[str, str, int | None], int]


def slab(line: str, size: int) -> Order:
    """
    Objects of ``size`` bytes in their slab, each with a pointer beside it.

    :param line: kind, node, size and number
    """
    nid, count = int(line.split()[1]), int(line.split()[3])
    return Order(line, count, {("slab", "unreclaimable", nid): (size + POINTER) * count})


def pages(line: str, detail: str, order: int) -> Order:
    nid, count = int(line.split()[1]), int(line.split()[3])
    return Order(line, count, {("kmem", detail, nid): (PAGE << order) * count})


def percpu(size: int, count: int) -> Order:
    """Memory on the node of each CPU, and a pointer for each four bytes of one CPU's."""
    data = {("percpu", "data", nid): size * count for nid in range(CPUS)}
    return Order(
        f"percpu {size} 8 {count}",
        count,
        {**data, ("percpu", "metadata", None): size // 4 * POINTER * count},
    )


def vmalloc(size: int, count: int, nid: int) -> Order:
    """Whole pages, from the node that the task runs on."""
    whole = -(-size // PAGE) * PAGE
    return Order(f"vmalloc -1 {size} {count}", count, {("kmem", "vmalloc", nid): whole * count})


@dataclass(frozen=True)
class Group:
    """A memcg, the node that its task runs on, and what the task asks for."""

    nid: int
    orders: tuple[Order, ...]

    def expected(self) -> dict[tuple[str, str, int | None], int]:
        total: defaultdict[tuple[str, str, int | None], int] = defaultdict(int)
        for order in self.orders:
            for key, size in order.expected.items():
                total[key] += size
        return dict(total)


def groups(kernel: str) -> dict[str, Group]:
    # Up to 6.12 nothing tells a large kmalloc from other compound pages.
    order = 2 if kernel.startswith("7.") else 0
    return {
        "/many": Group(
            nid=2,
            orders=(
                slab("kmalloc 1 100 5", 128),
                slab("kmalloc 2 3000 3", 4096),
                slab("cache 1 0 7", 200),
                slab("cache 3 0 150", 200),
                pages("kmalloc 3 20000 2", "large_kmalloc", 3),
                pages("kmalloc 0 9000 1", "large_kmalloc", 2),
                pages(f"pages 3 {order} 3", "other", order),
                pages("pages 0 0 4", "other", 0),
                percpu(4096, 2),
                percpu(8192, 1),
                vmalloc(100_000, 2, nid=2),
            ),
        ),
        "/few": Group(nid=0, orders=(slab("cache 3 0 11", 200), percpu(4096, 1))),
        "/none": Group(nid=1, orders=()),
    }


def script(wanted: dict[str, Group]) -> str:
    """
    For the guest: everything is opened before the task enters the memcg, so that nothing
    but what the module makes is charged to it.
    """
    lines = ["set -e", "cd /sys/fs/cgroup", "echo +memory >cgroup.subtree_control"]
    for path, group in wanted.items():
        words = " ".join(f"'{order.line}'" for order in group.orders)
        lines += [
            f"mkdir .{path}",
            f"taskset {1 << group.nid:x} sh -c '",
            "\texec 7>/sys/kernel/debug/charge/make 8>$0/cgroup.procs",
            "\techo 0 >&8",
            f'\tfor line; do echo "$line" >&7; done\' .{path} {words}',
        ]
    return "\n".join(lines) + "\n"


def guest_image(lab: Lab, kernel: str, append: str, folder: Path) -> Image:
    path = folder / "plant"
    path.write_text(script(groups(kernel)))
    append = f"{NO_KFENCE} {append}".strip()
    return lab.image(kernel, "4", "idle", modules=(MODULE,), run=str(path), append=append)


def by_path(snapshot: Snapshot) -> dict[str, int]:
    return {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}


def ledger_of(snapshot: Snapshot, memcg: int) -> dict[tuple[str, str, int | None], int]:
    """Kernel memory of one memcg; user pages of the shell that planted are not asked for."""
    found: defaultdict[tuple[str, str, int | None], int] = defaultdict(int)
    for entry, amount in snapshot.ledger:
        if snapshot.payer(entry.payer) == memcg and entry.kind != "lru":
            nid = None if entry.detail == "metadata" else entry.nid
            found[entry.kind, entry.detail, nid] += amount.bytes
    return dict(found)


class Held(NamedTuple):
    """
    One line of what the module holds.

    :ivar address: of percpu memory, the pointer that :c:func:`per_cpu_ptr` takes
    """

    kind: str
    nid: int
    address: int


def held(image: Image) -> list[Held]:
    text = (image.guest / "2/sys/kernel/debug/charge/held").read_text()
    lines = [line.split() for line in text.splitlines()]
    return [Held(kind, int(nid), int(address, 0)) for _, kind, nid, _, address, _ in lines]


def owners(wanted: dict[str, Group]) -> Iterator[tuple[str, Group]]:
    """Whose each held charge is: they are listed in the order in which they were made."""
    for path, group in wanted.items():
        for order in group.orders:
            yield from [(path, group)] * order.count


Place = tuple[str, int]  # path of the memcg, node


class Charged:
    """Addresses of what the readers find charged, with who pays and the node."""

    def __init__(self, image: Image) -> None:
        self.prog = image.program(dwarf=True)
        self.snapshot = collect(image_of(self.prog))
        self.objects: dict[int, Place] = {}
        self.kmem: dict[int, Place] = {}
        slabs, frames = SlabReader(image_of(self.prog)), mem_map(image_of(self.prog))
        for piece in scan_pages(image_of(self.prog)):
            for slab in map(slabs.slab, piece.slabs):
                assert slab is not None
                for thing in slabs.charged_objects(slab):
                    self.objects[thing.address] = self.path(thing.objcg), slab.nid
            for page in piece.kmem:
                self.kmem[frames.virt(page.page)] = self.path(page.objcg), page.nid
        self.frames = frames

    def path(self, objcg: int) -> str:
        payer = self.snapshot.payer(objcg)
        assert payer is not None
        return self.snapshot.memcgs[payer].path

    def areas(self) -> dict[int, set[Place]]:
        return {
            area.address: {
                self.kmem[virt] for virt in map(self.frames.virt, area.pages) if virt in self.kmem
            }
            for area in vm_areas(image_of(self.prog), Coverage(), Coverage())
        }

    def percpu(self) -> dict[int, tuple[str, list[int]]]:
        """By the address on CPU 0: the memcg, and the nodes that back it."""
        reader = PercpuReader(image_of(self.prog))
        first = self.prog["pcpu_unit_offsets"][0].value_()
        return {
            chunk.base + alloc.offset + first: (
                self.path(alloc.objcg),
                sorted(reader.data_nodes(alloc)),
            )
            for chunk in reader.chunks()
            for alloc in reader.charged(chunk)
        }


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_ledger_is_what_was_planted(lab: Lab, kernel: str, append: str, tmp_path: Path) -> None:
    image = guest_image(lab, kernel, append, tmp_path)
    snapshot = collect(image_of(image.program()))
    paths = by_path(snapshot)
    for path, group in groups(kernel).items():
        assert (path, ledger_of(snapshot, paths[path])) == (path, group.expected())
    assert image.report().verdict == "exact"


@pytest.mark.parametrize(("kernel", "append"), GUESTS)
def test_addresses_are_among_the_charged(
    lab: Lab, kernel: str, append: str, tmp_path: Path
) -> None:
    image = guest_image(lab, kernel, append, tmp_path)
    charged = Charged(image)
    areas, percpu_memory = charged.areas(), charged.percpu()
    per_cpu_offset = charged.prog["__per_cpu_offset"][0].value_()
    wanted, things = groups(kernel), held(image)
    seen: defaultdict[str, int] = defaultdict(int)
    for thing, (path, group) in zip(things, owners(wanted), strict=True):
        found: object
        if thing.kind == "percpu":
            on_cpu_0 = (thing.address + per_cpu_offset) % 2**64
            found, expected = percpu_memory.get(on_cpu_0), (path, list(range(CPUS)))
        elif thing.kind == "vmalloc":
            found, expected = areas.get(thing.address), {(path, group.nid)}
        else:
            place = charged.objects.get(thing.address) or charged.kmem.get(thing.address)
            found, expected = place, (path, thing.nid)
        assert (thing, found) == (thing, expected)
        seen[thing.kind] += 1
    assert seen == {"kmalloc": 11, "cache": 168, "pages": 7, "percpu": 4, "vmalloc": 2}
    # and each of them once: nothing else is charged to these memcgs
    mine = [
        place for place in (*charged.objects.values(), *charged.kmem.values()) if place[0] in wanted
    ]
    assert len(mine) == 11 + 168 + 7 + 2 * 25
    assert sum(path in wanted for path, _ in percpu_memory.values()) == 4


@pytest.mark.parametrize(("kernel", "append"), [g for g in GUESTS if g[0].startswith("7.")])
def test_skew_is_the_tasks_node_against_the_memorys(
    lab: Lab, kernel: str, append: str, tmp_path: Path
) -> None:
    """An obj_cgroup is that of the node on which the task was when it took one."""
    image = guest_image(lab, kernel, append, tmp_path)
    report = image.report()
    paths = {m.path: m.address for m in report.memcgs}
    for path, group in groups(kernel).items():
        expected: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        for (kind, _, nid), size in group.expected().items():
            if nid is not None:
                expected[kind, group.nid, nid] += size
        cells = {
            (s.kind, s.charged_nid, s.backing_nid): s.bytes
            for s in report.skew
            if s.memcg == paths[path] and s.kind in ("slab", "kmem") and s.bytes
        }
        assert cells == {key: size for key, size in expected.items() if key[0] != "percpu"}
