# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What was read is compared with the files of the guest, copied before it was frozen.

The files were copied twice, three seconds apart, and once more after the image was made. Only
values that are the same in all copies are compared: the image was made between them. Reading a
file flushes the counters, so a value in it is folded plus pending here, without what the object
stocks hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.guest_files import numbers, path_of, still, still_current
from support.guests import KERNELS, GuestImage, Lab

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of

IMAGES = [
    *((kernel, "4", "mixed") for kernel in KERNELS),
    *(("7.3", nodes, "mixed") for nodes in ("1", "2cpu+6mem")),
    ("6.1", "4", "dying"),
    ("7.3", "4", "dying"),
]
PAGE = 4096

#: Names in memory.stat and memory.numa_stat: the counter, any of those it has been, and the
#: bytes of its unit.
STATS: dict[str, tuple[tuple[str, ...], int]] = {
    "slab_reclaimable": (("NR_SLAB_RECLAIMABLE_B",), 1),
    "slab_unreclaimable": (("NR_SLAB_UNRECLAIMABLE_B",), 1),
    "percpu": (("MEMCG_PERCPU_B",), 1),
    "kernel": (("MEMCG_KMEM",), PAGE),
    "kernel_stack": (("NR_KERNEL_STACK_KB",), 1024),
    "pagetables": (("NR_PAGETABLE",), PAGE),
    "vmalloc": (("NR_VMALLOC", "MEMCG_VMALLOC"), PAGE),
    "zswap": (("MEMCG_ZSWAP_B",), 1),
    "zswapped": (("MEMCG_ZSWAPPED",), PAGE),
    "zswap_incomp": (("MEMCG_ZSWAP_INCOMP",), PAGE),
    "sock": (("MEMCG_SOCK",), PAGE),
}

pytestmark = pytest.mark.image


def online(snapshot: Snapshot) -> dict[str, int]:
    return {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}


def ancestors(snapshot: Snapshot, memcg: int | None) -> list[int]:
    found = []
    while memcg is not None:
        memcg = snapshot.memcgs[memcg].parent
        if memcg is not None:
            found.append(memcg)
    return found


def hierarchical(snapshot: Snapshot, memcg: int, name: str, nid: int | None) -> int:
    items, unit = STATS[name]
    item = next(i for i in items if i in snapshot.features.items)
    claim = snapshot.counters.hierarchical(memcg, item, nid)
    assert claim is not None
    return sum(claim) * unit


def check_stats(image: GuestImage, file: str) -> Counter[str]:
    """Compare one file of all memcgs; return the number of equal values above zero, by name."""
    snapshot = collect(image_of(image.program()))
    paths, over_zero = online(snapshot), Counter[str]()
    for (path, name, nid), value in still(image, file).items():
        if name in STATS:
            found = hierarchical(snapshot, paths[path], name, nid)
            assert (path, name, nid, found) == (path, name, nid, value)
            over_zero[name] += value > 0
    return over_zero


#: What every kernel's file has, and every workload some of.
ALWAYS = {"slab_reclaimable", "slab_unreclaimable", "percpu", "kernel", "vmalloc", "sock"}
#: What no task holds once its memcg is removed.
NEEDS_TASKS = {"kernel_stack", "pagetables", "zswap_incomp"}


def check_compared(image: GuestImage, file: str, over_zero: Counter[str], workload: str) -> None:
    """Check that there was something to compare."""
    said = {name for _, name, _ in numbers(image.guest / "2/cgroup", file)}
    assert set(over_zero) == said & set(STATS)
    full = set(over_zero) - (NEEDS_TASKS if workload == "dying" else set())
    assert min(over_zero[name] for name in full) >= 2, over_zero
    assert over_zero.total() >= (20 if workload == "dying" else 60)


@pytest.mark.parametrize(("kernel", "nodes", "workload"), IMAGES)
def test_memory_stat(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    image = lab.image(kernel, nodes, workload)
    over_zero = check_stats(image, "memory.stat")
    check_compared(image, "memory.stat", over_zero, workload)
    assert set(over_zero) >= ALWAYS | {"kernel_stack", "pagetables"}


@pytest.mark.parametrize(("kernel", "nodes", "workload"), IMAGES)
def test_memory_numa_stat(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    image = lab.image(kernel, nodes, workload)
    over_zero = check_stats(image, "memory.numa_stat")
    check_compared(image, "memory.numa_stat", over_zero, workload)
    assert set(over_zero) >= {
        "slab_reclaimable",
        "slab_unreclaimable",
        "kernel_stack",
        "pagetables",
    }


@pytest.mark.parametrize(("kernel", "nodes", "workload"), IMAGES)
def test_memory_current(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    """Page counters need no flush. They include pages that CPUs charged in advance."""
    image = lab.image(kernel, nodes, workload)
    snapshot = collect(image_of(image.program()))
    paths = online(snapshot)
    # the root has no such file
    assert {path_of(file, image.guest / "2/cgroup") for file in current_files(image)} == (
        set(paths) - {"/"}
    )
    current = still_current(image)
    assert {path: snapshot.usage[paths[path]] * PAGE for path in current} == current
    assert sum(value > 0 for value in current.values()) >= (2 if workload == "dying" else 30)


def current_files(image: GuestImage) -> Iterator[Path]:
    return (image.guest / "2/cgroup").rglob("memory.current")


@pytest.mark.parametrize(("kernel", "nodes", "workload"), IMAGES)
def test_cgroups(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    """Ids are inode numbers, and removed memcgs are counted by their ancestors."""
    image = lab.image(kernel, nodes, workload)
    snapshot = collect(image_of(image.program()))
    lines = (image.guest / "2/cgroups").read_text().splitlines()
    inodes = {path: int(inode) for inode, path in (line.split(" ", 1) for line in lines)}
    paths = online(snapshot)
    assert {path: snapshot.memcgs[address].cgroup_id for path, address in paths.items()} == inodes
    below: Counter[tuple[str, str]] = Counter()
    for memcg in snapshot.memcgs.values():
        for above in ancestors(snapshot, memcg.address):
            if snapshot.memcgs[above].state == "online":
                below[snapshot.memcgs[above].path, memcg.state] += 1
    said = still(image, "cgroup.stat")
    for path in paths:
        assert below[path, "online"] == said[path, "nr_descendants", None], path
        dying = said.get((path, "nr_dying_subsys_memory", None))  # since 6.12
        if dying is None:
            dying = said[path, "nr_dying_descendants", None]
        assert below[path, "dying"] == dying, path
    assert below["/", "dying"] >= 2
    assert below["/", "online"] >= 4
