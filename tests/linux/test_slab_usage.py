# SPDX-License-Identifier: LGPL-2.1-or-later
"""All slab and percpu memory, charged or not, compared with the guest's own files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from drgn.helpers.linux.list import list_for_each_entry
from support.guest_files import COPIES, in_all
from support.guests import DEBIAN_KERNELS, KERNELS, GuestImage, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.image.layout import constant
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.report import Report

RECLAIMABLE, UNRECLAIMABLE = "NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B"

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]


def slabinfo(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the number of slabs and of objects that fit in them, by cache."""
    caches = {}
    for line in (folder / "proc/slabinfo").read_text().splitlines()[2:]:
        words = line.split()
        caches[words[0]] = int(words[14]), int(words[2])
    return caches


def zoneinfo(folder: Path) -> dict[tuple[int, str], int]:
    """Return the slab counters of each node, in pages."""
    values, nid = {}, -1
    for line in (folder / "proc/zoneinfo").read_text().splitlines():
        node = re.match(r"Node (\d+),", line)
        nid = int(node[1]) if node else nid
        counter = re.match(r" +nr_(slab_\w+) (\d+)$", line)
        if counter:
            values[nid, f"NR_{counter[1].upper()}_B"] = int(counter[2])
    return values


TOPOLOGIES = ("1", "4", "2cpu+6mem")


def by_cache(report: Report) -> dict[str, tuple[int, int]]:
    slabs, objects = Counter[str](), Counter[str]()
    for usage in report.slab_usage:
        if not usage.kfence:
            slabs[usage.cache] += usage.slabs
            objects[usage.cache] += usage.objects
    return {cache: (slabs[cache], objects[cache]) for cache in slabs}


def counted_by_kernel(image: GuestImage) -> dict[str, tuple[int, int]]:
    """Return what ``get_slabinfo()`` adds up when the file is read, by cache."""
    slabs, objects = Counter[str](), Counter[str]()
    prog = image.program()
    nids = image.report().image.nodes
    for cache in list_for_each_entry(
        "struct kmem_cache", prog["slab_caches"].address_of_(), "list"
    ):
        name = cache.name.string_().decode()
        for nid in nids:
            has_node = cache.type_.type.has_member("node")
            node = cache.node[nid] if has_node else cache.per_node[nid].node
            slabs[name] += int(node.nr_slabs.counter)
            objects[name] += int(node.total_objects.counter)
    return {cache: (slabs[cache], objects[cache]) for cache in slabs}


def freed_by_rcu(image: GuestImage) -> set[str]:
    """Return the caches whose slabs are not counted from ``discard_slab()`` on, and freed later."""
    prog = image.program()
    caches = list_for_each_entry("struct kmem_cache", prog["slab_caches"].address_of_(), "list")
    bit = constant(image_of(prog), "_SLAB_TYPESAFE_BY_RCU")
    flag = 1 << (19 if bit is None else bit)  # Up to 6.9 it is a macro.
    return {cache.name.string_().decode() for cache in caches if int(cache.flags) & flag}


@pytest.mark.parametrize("nodes", ["1", "4"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_slabinfo_says_the_same(lab: Lab, kernel: str, nodes: str) -> None:
    image = lab.image(kernel, nodes, "mixed")
    found, counted = by_cache(image.report()), counted_by_kernel(image)
    assert found.keys() <= counted.keys()
    waiting = freed_by_rcu(image)
    for cache, both in counted.items():
        here = found.get(cache, (0, 0))
        # A grace period may not be over yet.
        assert here == both or (cache in waiting and here > both), cache
    # A slab may be allocated and freed again between two reads.
    still = in_all(slabinfo(image.guest / which) for which in COPIES)
    moved = {c: (v, counted.get(c)) for c, v in still.items() if counted.get(c, (0, 0)) != v}
    assert 2 * len(moved) < len(still), moved


def settled(image: GuestImage) -> dict[tuple[int, str], int]:
    return in_all(zoneinfo(image.guest / which) for which in COPIES)


def kept_items(kernel: str) -> set[str]:
    """Return the counters of nodes that are compared."""
    # Older kernels do not mark large kmallocs.
    return {RECLAIMABLE} if kernel.startswith("6.") else {RECLAIMABLE, UNRECLAIMABLE}


@pytest.mark.parametrize("kernel", KERNELS)
def test_nodes_say_the_same(lab: Lab, kernel: str) -> None:
    # The counters of nodes without CPUs seldom change: one of three topologies has such a node.
    # Where they did all the same, other guests are looked at.
    wanted = kept_items(kernel)
    same = set[str]()
    for again in range(4):
        more = {"append": f"lab.again={again}"} if again else {}
        for nodes in TOPOLOGIES:
            same |= _same_counters(lab.image(kernel, nodes, "mixed", **more), kernel)
        if same == wanted:
            return
    assert same == wanted


def _same_counters(image: GuestImage, kernel: str) -> set[str]:
    """Return which counters of a node are what the guest's zoneinfo said."""
    report = image.report()
    rows = {(r.nid or 0, r.item): r for r in report.rows if r.identity == "node_slab"}
    items = {item for _, item in rows}
    assert items == kept_items(kernel)
    assert len(rows) == len(report.image.nodes) * len(items)
    assert {row.status for row in rows.values()} == {"exact"}
    # /proc/zoneinfo folds the counters of all CPUs before it prints them.
    return {
        item
        for (nid, item), value in settled(image).items()
        if (nid, item) in rows and sum((rows[nid, item].claimed or {}).values()) == value
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_some_slab_memory_is_paid_for_and_some_is_not(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel, "4", "mixed").report()
    for usage in report.slab_usage:
        assert usage.charged is not None
        if usage.kfence:
            continue  # the lab's own kernels have it on
        assert 0 <= usage.charged <= usage.inuse <= usage.objects, usage
        assert usage.pages * report.image.page_size >= usage.objects * usage.size, usage
    charged = sum((u.charged or 0) * u.charge for u in report.slab_usage)
    rows = [row for row in report.rows if row.identity == "slab"]
    assert charged == sum(row.found["slab"] for row in rows)
    assert 0 < charged < sum(u.pages for u in report.slab_usage) * report.image.page_size
    assert any(u.inuse and not u.charged for u in report.slab_usage)


@pytest.mark.parametrize("nodes", TOPOLOGIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_percpu_pages_are_those_the_allocator_counts(lab: Lab, kernel: str, nodes: str) -> None:
    image = lab.image(kernel, nodes, "mixed")
    prog, report = image.program(), image.report()
    populated = prog["pcpu_nr_populated"].value_()
    assert populated > 0
    # They include static percpu variables. Units of CPUs that are not possible have no pages.
    assert sum(u.pages for u in report.percpu_usage) == populated * report.image.cpus
    size = report.image.page_size
    assert all(0 <= u.charged <= u.allocated <= u.pages * size for u in report.percpu_usage)
    found = sum(row.found["percpu"] for row in report.rows if row.identity == "percpu")
    if found:  # the per-node series counts percpu memory elsewhere
        assert sum(u.charged for u in report.percpu_usage) == found


@pytest.mark.long
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[1:])
def test_pages_of_kfence_are_in_no_counter(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "2", "files", append="kfence.sample_interval=1")
    prog, report = image.program(), image.report()
    pool = kfence_pages(image_of(prog))
    # CONFIG_KFENCE_NUM_OBJECTS is 255. Each object has a page and a guard page; so has the pool.
    assert len(pool) == 512
    assert mem_map(image_of(prog)).virt(pool[0]) == prog["__kfence_pool"].value_()
    guarded = [usage for usage in report.slab_usage if usage.kfence]
    assert 0 < sum(usage.pages for usage in guarded) <= 255
    rows = [r for r in report.rows if r.identity in ("node_slab", "slab", "placement")]
    assert {row.status for row in rows} == {"exact"}
