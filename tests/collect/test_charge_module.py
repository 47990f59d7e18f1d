# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The charges that a test module makes are found, to the byte, on their nodes, at their addresses.

The module (``fixtures/modules/charge``) makes charges in memcgs that hold nothing else, so
everything that the ledger says of them is plain arithmetic. It also lists the address of
each charge, in a file of its own that the guest hands over.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from support.charge_module import CPUS, GUESTS, groups, guest_image, held, owners
from support.guests import GuestImage, Lab

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.mm.vmalloc import vm_areas
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image


def by_path(snapshot: Snapshot) -> dict[str, int]:
    return {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}


def ledger_of(snapshot: Snapshot, memcg: int) -> dict[tuple[str, str, int | None], int]:
    """Return the kernel memory of one memcg, without user pages of the shell."""
    found: defaultdict[tuple[str, str, int | None], int] = defaultdict(int)
    for entry, amount in snapshot.ledger:
        if snapshot.payer(entry.payer) == memcg and entry.kind != "lru":
            nid = None if entry.detail == "metadata" else entry.nid
            found[entry.kind, entry.detail, nid] += amount.bytes
    return dict(found)


Place = tuple[str, int]  # path of the memcg, node


class Charged:
    """Return the addresses that readers find charged, with the payer and the node."""

    def __init__(self, image: GuestImage) -> None:
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
    assert seen == {
        "kmalloc": 11, "cache": 168, "pages": 7, "block": 7, "percpu": 4, "vmalloc": 2,
    }  # fmt: skip
    # and each of them once: nothing else is charged to these memcgs
    mine = [
        place for place in (*charged.objects.values(), *charged.kmem.values()) if place[0] in wanted
    ]
    assert len(mine) == 11 + 168 + 7 + 7 + 2 * 25
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
