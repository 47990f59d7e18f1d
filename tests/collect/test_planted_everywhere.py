# SPDX-License-Identifier: LGPL-2.1-or-later
"""
One fault for each identity, planted into a copy of an image of each kernel.

Each is named with its memcg, node, item and exact amount, and no finding is on a memcg that
was not touched; ancestors are touched by what happens below them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import drgn
import pytest
from support.findings import by_path, named, touched
from support.free_pages import free_page
from support.guests import KERNELS, ROOT, GuestImage, Lab, Plant

from memcg_inspect.checks.identities.lru import lru_rows
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.linux.net.sock import SockReader

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

Change = tuple[str, str | int]
Named = tuple[str, int | None, str, int | None]


class Fault(NamedTuple):
    """What to write, which paths that touches, and what must be named."""

    changes: list[Change]
    paths: tuple[str, ...]
    expected: set[Named]


class Subject:
    """An image, read once, to choose victims from."""

    def __init__(self, image: GuestImage) -> None:
        self.prog = image.program()
        self.paths = by_path(image.report())
        self.snapshot: Snapshot = collect(image_of(self.prog))

    def memcg(self, path: str) -> str:
        return f"Object(prog, 'struct mem_cgroup *', {self.paths[path]:#x})"

    def path(self, address: int) -> str:
        payer = self.snapshot.payer(address)
        return self.snapshot.memcgs[payer or 0].path

    def percpu_state(self, path: str, item: str, nid: int | None = None, cpu: int = 0) -> str:
        slot = StatReader(image_of(self.prog), [item]).slots[item]
        if nid is None:
            return f"per_cpu_ptr({self.memcg(path)}.vmstats_percpu, {cpu}).state[{slot}]"
        stats = f"{self.memcg(path)}.nodeinfo[{nid}].lruvec_stats_percpu"
        return f"per_cpu_ptr({stats}, {cpu}).state[{slot}]"

    def largest(self, kind: str, detail: str | None = None) -> tuple[str, int]:
        """The online leaf memcg that has most of something, and the node it has it on."""
        leaves = set(self.paths.values()) - {m.parent for m in self.snapshot.memcgs.values()}
        found = self.snapshot.by_node(kind, detail)  # type: ignore[arg-type]
        (memcg, nid), amount = max(
            ((k, a) for k, a in found.items() if k[0] in leaves), key=lambda pair: pair[1].bytes
        )
        assert amount.bytes
        return self.snapshot.memcgs[memcg].path, nid


def counter_fault(
    kind: str, detail: str | None, items: tuple[str, ...], amount: int, by_node: bool
) -> Callable[[Subject], Fault]:
    def plant(subject: Subject) -> Fault:
        item = next(i for i in items if i in subject.snapshot.features.items)
        per_node = by_node and item.startswith("NR_")
        path, nid = subject.largest(kind, detail)
        where = nid if per_node else None
        change = (subject.percpu_state(path, item, where), f"old + {amount}")
        return Fault([change], (path,), {(path, where, item, amount)})

    return plant


def objcg_of(subject: Subject, path: str) -> int:
    """A live obj_cgroup of a memcg that has charges."""
    used = {entry.payer for entry, _ in subject.snapshot.ledger if entry.kind == "slab"}
    return next(
        address
        for address, objcg in subject.snapshot.objcgs.items()
        if objcg.memcg == subject.paths[path] and objcg.memcg_refs and address in used
    )


def percpu_owner(subject: Subject) -> Fault:
    reader = PercpuReader(image_of(subject.prog))
    allocs = [a for chunk in reader.chunks() for a in reader.charged(chunk)]
    path, _ = subject.largest("percpu", "data")
    alloc = next(a for a in allocs if subject.path(a.objcg) == path)
    thief = "/files/web"
    size = reader.charge(alloc)
    return Fault(
        [(f"u64:{alloc.element:#x}", objcg_of(subject, thief))],
        (path, thief),
        {
            (path, None, "MEMCG_PERCPU_B", size),
            (thief, None, "MEMCG_PERCPU_B", -size),
        },
    )


def left_over_bytes(subject: Subject) -> Fault:
    path = "/files/mail"
    objcg = objcg_of(subject, path)
    nid = subject.snapshot.objcgs[objcg].nid
    return Fault(
        [(f"Object(prog, 'struct obj_cgroup *', {objcg:#x}).nr_charged_bytes", "old + 24")],
        (path,),
        {(path, nid, "bytes of whole pages", -24)},
    )


def reference(subject: Subject) -> Fault:
    path = "/files/mail"
    objcg = objcg_of(subject, path)
    nid = subject.snapshot.objcgs[objcg].nid
    count = f"Object(prog, 'struct obj_cgroup *', {objcg:#x}).refcnt.data.count"
    return Fault([(count, "old + 2")], (path,), {(path, nid, "refcnt", 2)})


def zswap_length(subject: Subject) -> Fault:
    entry = next(
        e
        for e in ZswapReader(image_of(subject.prog)).entries()
        if 200 < e.length < 3000 and subject.path(e.objcg) != "/"
    )
    path = subject.path(entry.objcg)
    length = f"Object(prog, 'struct zswap_entry *', {entry.address:#x}).length"
    return Fault([(length, "old - 8")], (path,), {(path, None, "MEMCG_ZSWAP_B", 8)})


def socket_memory(subject: Subject) -> Fault:
    slabs = SlabReader(image_of(subject.prog))
    reader = SockReader(image_of(subject.prog), slabs)
    socks = (
        sock
        for piece in scan_pages(image_of(subject.prog))
        for page in piece.slabs
        for sock in reader.read(slabs.slab(page), subject.snapshot.memcgs)
    )
    sock = max(socks, key=lambda s: s.charged)
    assert sock.charged
    path = subject.path(sock.memcg)
    page = mem_map(image_of(subject.prog)).page_size
    field = f"Object(prog, 'struct sock *', {sock.address:#x}).sk_forward_alloc"
    return Fault([(field, f"old + {2 * page}")], (path,), {(path, None, "MEMCG_SOCK", -2)})


def page_counter(subject: Subject) -> Fault:
    path = "/files/web"
    return Fault(
        [(f"{subject.memcg(path)}.memory.usage", "old + 3")],
        (path,),
        {(path, None, "memory.usage", 3), ("/files", None, "memory.usage", -3)},
    )


def lru_size(subject: Subject) -> Fault:
    """The size of the longest list of a memcg, under the name that the row gives it."""
    rows = [r for r in lru_rows(subject.snapshot) if r.memcg in set(subject.paths.values())]
    row = max((r for r in rows if r.memcg != subject.paths["/"]), key=lambda r: r.found["lru"])
    assert row.found["lru"] > 100
    path, prog = subject.path(row.memcg or 0), subject.prog
    constants = {"LRU_GEN_ANON": 0, "LRU_GEN_FILE": 1, **enumerators(prog, "enum lru_list")}
    constants |= enumerators(prog, "enum zone_type")
    field = re.sub(r"\b(LRU|ZONE)_\w+", lambda m: str(constants[m[0]]), row.item)
    field = field.replace("lrugen.", "lruvec.lrugen.")
    change = (f"{subject.memcg(path)}.nodeinfo[{row.nid}].{field}", "old + 3")
    return Fault([change], (path,), {(path, row.nid, row.item, 3)})


def enumerators(prog: drgn.Program, name: str) -> dict[str, int]:
    return {e.name: e.value for e in prog.type(name).enumerators}


def memcg_level(subject: Subject) -> Fault:
    path, item = "/files/db", "NR_SLAB_RECLAIMABLE_B"
    change = (subject.percpu_state(path, item, cpu=1), "old - 200")
    return Fault([change], (path,), {(path, None, item, -200)})


def parents_counter(subject: Subject) -> Fault:
    """A parent's own folded counter. Its row of ``hierarchy`` tells it from a child's."""
    path, item = "/files", "NR_SLAB_RECLAIMABLE_B"
    slot = StatReader(image_of(subject.prog), [item]).slots[item]
    stats = f"{subject.memcg(path)}.nodeinfo[0].lruvec_stats"
    return Fault([(f"{stats}.state[{slot}]", "old + 96")], (path,), {(path, 0, item, 96)})


def node_counter(subject: Subject) -> Fault:
    item = "NR_SLAB_RECLAIMABLE_B"
    counter = f"prog['node_data'][1].vm_stat[prog['{item}'].value_()].counter"
    return Fault([(counter, "old - 2")], (), {("?", 1, item, -2)})


def task_cache(subject: Subject) -> Fault:
    root = next(iter(subject.snapshot.memcgs))
    task = next(
        t
        for t in subject.snapshot.tasks
        if t.is_user
        and not t.stale
        and any(t.objcgs)
        and t.memcg != root
        and subject.path(t.memcg) not in ("/files/db",)
    )
    path, thief = subject.path(task.memcg), "/files/db"
    change = (
        f"Object(prog, 'struct task_struct *', {task.address:#x}).objcg",
        objcg_of(subject, thief),
    )
    return Fault([change], (path, thief), {(path, None, "task->objcg", 1)})


def left_behind(subject: Subject) -> Fault:
    """An obj_cgroup that a removed memcg left to its parent belongs to it again."""
    memcgs, objcgs = subject.snapshot.memcgs, subject.snapshot.objcgs
    objcg, memcg = next(
        (objcg, memcg)
        for memcg in memcgs.values()
        if memcg.offline
        for objcg in objcgs.values()
        if objcg.memcg == memcg.payer and objcg.memcg != memcg.address
        if not objcg.is_root and memcgs[memcg.payer].parent is not None
    )
    change = (f"Object(prog, 'struct obj_cgroup *', {objcg.address:#x}).memcg", memcg.address)
    expected = {(memcg.path, objcg.nid, "objcg->memcg", -1)}
    return Fault([change], (memcg.path,), expected)


def dangling_vector(subject: Subject) -> Fault:
    """A copy of a vector in a free page, which its slab points to instead."""
    prog, memory, frames = (
        subject.prog,
        image_of(subject.prog).memory,
        mem_map(image_of(subject.prog)),
    )
    slabs = SlabReader(image_of(prog))
    slab = next(
        s
        for piece in scan_pages(image_of(prog))
        for s in map(slabs.slab, piece.slabs)
        if s.charged
        and slabs.vector_page(s) is not None
        and s.objects <= 64
        and s.vector.stride in (8, 16)
    )
    offset = slabs.layout.exts.word * memory.word_size
    vector = memory.read(slab.vector.address, slab.vector.stride * slab.objects)
    target = frames.virt(free_page(prog, other_than=slab.nid))
    changes = [
        (f"u64:{target + 8 * i:#x}", int.from_bytes(vector[8 * i : 8 * i + 8], "little"))
        for i in range(len(vector) // 8)
    ]
    old = memory.word(slab.page + offset)
    changes.append((f"u64:{slab.page + offset:#x}", target | old & 7))
    return Fault(changes, (), {("?", slab.nid, "obj_exts", 1)})


COUNTERS = {
    "percpu": counter_fault("percpu", "data", ("MEMCG_PERCPU_B",), 96, False),
    "kernel_stack": counter_fault("kmem", "stack", ("NR_KERNEL_STACK_KB",), -16, True),
    "pagetable": counter_fault("kmem", "table", ("NR_PAGETABLE",), 1, True),
    "vmalloc": counter_fault("kmem", "vmalloc", ("NR_VMALLOC", "MEMCG_VMALLOC"), 5, True),
    "kmem": counter_fault("kmem", None, ("MEMCG_KMEM",), -2, False),
    "zswap": counter_fault("zswap", None, ("MEMCG_ZSWAPPED",), 7, False),
    "sock": counter_fault("sock", None, ("MEMCG_SOCK",), 1, False),
}
#: (identity that must name it, fault)
FAULTS: dict[str, tuple[str, Callable[[Subject], Fault]]] = {
    **{f"counter of {name}": (name, plant) for name, plant in COUNTERS.items()},
    "owner of a percpu allocation": ("percpu", percpu_owner),
    "left-over bytes": ("objcg_bytes", left_over_bytes),
    "reference": ("references", reference),
    "length of a zswap entry": ("zswap", zswap_length),
    "memory of a socket": ("sock", socket_memory),
    "page counter": ("usage", page_counter),
    "size of an LRU list": ("lru", lru_size),
    "counter of one level": ("levels", memcg_level),
    "counter of a parent": ("hierarchy", parents_counter),
    "counter of a node": ("node_slab", node_counter),
    "cache of a task": ("task_objcg", task_cache),
    "obj_cgroup left behind": ("reparenting", left_behind),
    "dangling vector": ("placement", dangling_vector),
}

#: Identities whose faults other test files plant.
ELSEWHERE = {"slab"} | {
    path.stem.removeprefix("test_") for path in (ROOT / "tests/identities").glob("test_*.py")
}


@lru_cache(maxsize=2)
def subject_of(image: GuestImage) -> Subject:
    return Subject(image)


@pytest.mark.parametrize("kernel", KERNELS)
def test_named_exactly(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    subject = Subject(image)
    kept = {i.name for i in image.report().identities if i.status != "not-kept"}
    planted = 0
    for what, (identity, choose) in FAULTS.items():
        if identity not in kept:
            continue
        fault = choose(subject)
        report = plant(image, *fault.changes)
        assert report.verdict == "findings", what
        assert named(report, identity) == fault.expected, what
        assert touched(report, *fault.paths), (what, report.findings)
        plant.remove()
        planted += 1
    covered = {identity for identity, _ in FAULTS.values()}
    assert covered | ELSEWHERE >= kept
    assert planted >= len(kept - ELSEWHERE)
