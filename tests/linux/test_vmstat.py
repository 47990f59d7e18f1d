# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counters of nodes and zones: what is read, what is counted as read, and what is missing."""

from __future__ import annotations

import pytest
from drgn import Object, Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.vmstat import (
    node_stat_words,
    read_node_stats,
    read_total_stats,
    read_zone_totals,
    zone_stat_words,
    zone_stats,
)
from memcg_inspect.model import Coverage

#: ``enum zone_type`` of Debian's kernels for x86-64
ZONES = ("ZONE_DMA", "ZONE_DMA32", "ZONE_NORMAL", "ZONE_MOVABLE", "ZONE_DEVICE")


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_counters_of_nodes(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4")
    nodes, totals = Coverage(), Coverage()
    prog = image.program()
    stats = read_node_stats(image_of(prog), nodes)
    assert {nid for nid, _ in stats} == {0, 1, 2, 3}
    found = read_total_stats(image_of(prog), totals)
    assert found.keys() == {name for _, name in stats}
    assert (nodes.read, totals.read) == (4, 1)
    prog = opened(image.core)
    prog.add_memory_segment(prog["vm_node_stat"].address_ or 0, 8, excluded, False)
    assert read_total_stats(image_of(prog), totals) == {}
    assert (totals.read, totals.unreadable) == (1, 1)


# What the kernel's own macros say of each counter


def values(array: Object, names: list[str], prog: Program) -> dict[str, int]:
    return {name: int(array[prog[name]].counter) for name in names}


def changes(percpu: Object, member: str, names: list[str], prog: Program) -> dict[str, int]:
    """Return the sum of what all CPUs have not added yet."""
    of_cpus = [per_cpu_ptr(percpu, cpu).member_(member) for cpu in for_each_possible_cpu(prog)]
    return {name: sum(int(diff[prog[name]]) for diff in of_cpus) for name in names}


def odd_changes(prog: Program, percpu: Object, member: str) -> None:
    """Let CPU 1 have the least and the most that one byte can hold, for the first two items."""
    diff = per_cpu_ptr(percpu, 1).member_(member)
    Overlay(prog).write((Write(diff.address_ or 0, b"\x80\x7f"),))


def items(prog: Program, enum: str, end: str) -> list[str]:
    """Return the names of an enum up to its end. A base is the first of its items."""
    last = prog[end].value_()
    names = [e.name for e in prog.type(enum).enumerators or () if e.value < last]
    return [name for name in names if not name.endswith("_BASE")]


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_counters_of_nodes_are_those_of_the_kernel(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    for pgdat in for_each_online_pgdat(prog):
        odd_changes(prog, pgdat.per_cpu_nodestats, "vm_node_stat_diff")
    names = items(prog, "enum node_stat_item", "NR_VM_NODE_STAT_ITEMS")
    found = read_node_stats(image_of(prog), Coverage())
    for pgdat in for_each_online_pgdat(prog):
        nid = int(pgdat.node_id)
        folded = values(pgdat.vm_stat, names, prog)
        of_cpus = changes(pgdat.per_cpu_nodestats, "vm_node_stat_diff", names, prog)
        assert {n: s for (node, n), s in found.items() if node == nid} == {
            name: (folded[name], of_cpus[name]) for name in names
        }
        words = [(w.item, w.address) for w in node_stat_words(image_of(prog), nid)]
        assert words == [(name, pgdat.vm_stat[prog[name]].address_) for name in names]
        kinds = {(w.array, w.size) for w in node_stat_words(image_of(prog), nid)}
        assert kinds == {("vm_stat", 8)}
    assert read_total_stats(image_of(prog), Coverage()) == values(prog["vm_node_stat"], names, prog)


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_counters_of_zones_are_those_of_the_kernel(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    for pgdat in for_each_online_pgdat(prog):
        odd_changes(prog, pgdat.node_zones[1].per_cpu_zonestats, "vm_stat_diff")
    image, coverage = image_of(prog), Coverage()
    names = items(prog, "enum zone_stat_item", "NR_VM_ZONE_STAT_ITEMS")
    sums = dict.fromkeys(names, 0)
    for pgdat in for_each_online_pgdat(prog):
        found = list(zone_stat_words(image, int(pgdat.node_id)))
        words = {(w.item, w.address) for w in found}
        assert {(w.array, w.size) for w in found} == {("zone_stat", 8)}
        for zone, kind in zip(pgdat.node_zones, ZONES, strict=False):
            folded = values(zone.vm_stat, names, prog)
            of_cpus = changes(zone.per_cpu_zonestats, "vm_stat_diff", names, prog)
            found = zone_stats(image, zone)
            assert found == {name: (folded[name], of_cpus[name]) for name in names}
            sums = {name: sums[name] + folded[name] for name in names}
            for name in names:
                assert (f"{name}[{kind}]", zone.vm_stat[prog[name]].address_) in words
    assert read_zone_totals(image, coverage) == (values(prog["vm_zone_stat"], names, prog), sums)
    assert (coverage.read, coverage.unreadable) == (1, 0)


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_counters_that_are_missing(lab: Lab, kernel: str) -> None:
    """Of one node, and of all zones together."""
    prog = lab.image(kernel, "4").own_program()
    node = next(p for p in for_each_online_pgdat(prog) if p.node_id == 1)
    for array in (node.vm_stat, prog["vm_zone_stat"]):
        prog.add_memory_segment(array.address_ or 0, 8, excluded, False)
    nodes, zones = Coverage(), Coverage()
    assert {nid for nid, _ in read_node_stats(image_of(prog), nodes)} == {0, 2, 3}
    assert (nodes.read, nodes.unreadable) == (3, 1)
    assert read_zone_totals(image_of(prog), zones) == ({}, {})
    assert (zones.read, zones.unreadable) == (0, 1)
