# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of nodes and zones in memory made by hand: of machines with one CPU, and damaged ones.

``tests/linux/test_vmstat.py`` compares those of images with the kernel's own macros.
"""

from __future__ import annotations

import pytest
from support.layouts import MadeImage

from memcg_inspect.linux.mm.mmzone import online_nodes, possible_nodes, zone_types
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.linux.mm.vmstat import (
    node_stat_words,
    read_node_stats,
    read_total_stats,
    read_zone_totals,
    zone_stat_words,
    zone_stats,
)
from memcg_inspect.model import Coverage
from memcg_inspect.model_counters import CounterWord

VARIABLES, MISSING = 0xFFFFFFFF82000000, 0xFFFF888077700000
NODES = tuple(0xFFFF888030000000 + 0x10000 * n for n in range(4))
PERCPU, ZONE_PERCPU = 0xFFFF888031000000, 0xFFFF888031000100
CPUS = {0: 0, 1: 0x1000}


def kernel(cpus: bool = True) -> MadeImage:
    """
    Return a kernel that can have four nodes, the third of which does not exist.

    The second one has no CPU or memory any more. Each node has two zones.

    :param cpus: whether CPUs have changes of their own (``CONFIG_SMP``)
    """
    image = MadeImage()
    of_zone = "signed char vm_stat_diff[2];" if cpus else ""
    of_node = "struct per_cpu_nodestat *per_cpu_nodestats;" if cpus else ""
    image.declare(
        f"""
        struct atomic_long {{ long counter; }};
        struct per_cpu_nodestat {{ signed char stat_threshold;
                                  signed char vm_node_stat_diff[3]; }};
        struct per_cpu_zonestat {{ signed char stat_threshold; {of_zone} }};
        struct zone {{ struct per_cpu_zonestat *per_cpu_zonestats;
                      struct atomic_long vm_stat[2]; }};
        struct pglist_data {{ struct zone node_zones[2]; int node_id; {of_node}
                             struct atomic_long vm_stat[3]; }};
        """
    )
    image.enum("node_stat_item", NR_ONE=0, NR_TWO=1, NR_THREE=2, NR_VM_NODE_STAT_ITEMS=3)
    image.enum("zone_stat_item", NR_FREE=0, NR_MLOCK=1, NR_VM_ZONE_STAT_ITEMS=2)
    image.given |= {possible_nodes: range(4), online_nodes: (0, 3), percpu_offsets: CPUS}
    image.given[zone_types] = {0: "ZONE_DMA", 1: "ZONE_NORMAL"}
    image.variable("node_data", "struct pglist_data *[4]", VARIABLES)
    image.words(VARIABLES, NODES[0], NODES[1], 0, NODES[3])
    image.variable("vm_node_stat", "struct atomic_long[3]", VARIABLES + 64)
    image.variable("vm_zone_stat", "struct atomic_long[2]", VARIABLES + 128)
    image.words(VARIABLES + 64, 100, (1 << 64) - 2, 300)
    image.words(VARIABLES + 128, 40, 50)
    for number in (0, 1, 3):
        put_node(image, number)
    for cpu, (of_node_, of_zone_) in enumerate((([1, -3, 127], [2, 0]), ([0, 3, 1], [-128, 5]))):
        offset = CPUS[cpu]
        image.write(PERCPU + offset + 1, bytes(n % 256 for n in of_node_))
        image.write(ZONE_PERCPU + offset + 1, bytes(n % 256 for n in of_zone_))
    return image


def put_node(image: MadeImage, number: int) -> None:
    """Write a node with the counters 10n+1, -(10n+2) and 10n+3, and those of its zones."""
    has_cpus = image.type("struct pglist_data").has_member("per_cpu_nodestats")
    place = NODES[number]
    members = {"per_cpu_nodestats": PERCPU} if has_cpus else {}
    image.make("struct pglist_data", place, {"node_id": number, **members})
    stat = place + image.type("struct pglist_data").member("vm_stat").offset
    image.words(stat, 10 * number + 1, (1 << 64) - 10 * number - 2, 10 * number + 3)
    for zone in range(2):
        image.words(place + 24 * zone, ZONE_PERCPU, 10 * number + zone, (1 << 64) - 1)


def missed(coverage: Coverage) -> list[tuple[str, int, str]]:
    return [(one.what, one.address, one.reason) for one in coverage.examples]


def test_counters_of_nodes() -> None:
    """A node that went offline keeps its counters. CPUs hold nothing of it."""
    coverage = Coverage()
    assert read_node_stats(kernel(), coverage) == {
        (0, "NR_ONE"): (1, 1),
        (0, "NR_TWO"): (-2, 0),
        (0, "NR_THREE"): (3, 128),
        (1, "NR_ONE"): (11, 0),
        (1, "NR_TWO"): (-12, 0),
        (1, "NR_THREE"): (13, 0),
        (3, "NR_ONE"): (31, 1),
        (3, "NR_TWO"): (-32, 0),
        (3, "NR_THREE"): (33, 128),
    }
    assert (coverage.read, coverage.unreadable) == (3, 0)


def test_counters_of_a_machine_with_one_cpu() -> None:
    """Without CONFIG_SMP, no CPU holds changes."""
    image = kernel(cpus=False)
    found = read_node_stats(image, Coverage())
    assert [found[0, name] for name in ("NR_ONE", "NR_TWO", "NR_THREE")] == [
        (1, 0),
        (-2, 0),
        (3, 0),
    ]
    zone = image.pointer("struct pglist_data *", NODES[3]).node_zones[1]
    assert zone_stats(image, zone) == {"NR_FREE": (31, 0), "NR_MLOCK": (-1, 0)}


def test_a_node_that_is_not_in_the_image() -> None:
    """The others are read."""
    image = kernel()
    image.forget(NODES[0])
    coverage = Coverage()
    assert {nid for nid, _ in read_node_stats(image, coverage)} == {1, 3}
    at = NODES[0] + image.type("struct pglist_data").member("vm_stat").offset
    assert missed(coverage) == [("counters of a node", at, f"not made: {at:#x}")]
    assert coverage.read == 2
    image.forget(PERCPU + CPUS[1])
    coverage, at = Coverage(), PERCPU + CPUS[1] + 1
    assert {nid for nid, _ in read_node_stats(image, coverage)} == {1}
    assert missed(coverage)[-1] == ("counters of a node", at, f"not made: {at:#x}")
    assert (coverage.read, coverage.unreadable) == (1, 2)


def test_sums_of_all_nodes() -> None:
    image, coverage = kernel(), Coverage()
    assert read_total_stats(image, coverage) == {"NR_ONE": 100, "NR_TWO": -2, "NR_THREE": 300}
    assert coverage.read == 1
    image.variable("vm_node_stat", "struct atomic_long[3]", MISSING)
    assert read_total_stats(image, coverage) == {}
    assert missed(coverage) == [("counters of all nodes", MISSING, f"not made: {MISSING:#x}")]
    del image._objects["vm_node_stat"]
    assert read_total_stats(image, coverage) == {}
    assert (coverage.read, coverage.unreadable) == (1, 1)


def test_counters_of_zones() -> None:
    image, coverage = kernel(), Coverage()
    zone = image.pointer("struct pglist_data *", NODES[3]).node_zones[1]
    assert zone_stats(image, zone) == {"NR_FREE": (31, -126), "NR_MLOCK": (-1, 5)}
    free = sum((0, 1, 10, 11, 30, 31))
    totals, sums = read_zone_totals(image, coverage)
    assert totals == {"NR_FREE": 40, "NR_MLOCK": 50}
    assert sums == {"NR_FREE": free, "NR_MLOCK": -6}
    assert (coverage.read, coverage.unreadable) == (1, 0)


@pytest.mark.parametrize("what", ["vm_zone_stat", "a node"])
def test_sums_of_zones_that_are_not_in_the_image(what: str) -> None:
    image, coverage = kernel(), Coverage()
    at = MISSING
    if what == "a node":
        image.forget(NODES[1])
        at = NODES[1] + 8
    else:
        image.variable(what, "struct atomic_long[2]", MISSING)
    assert read_zone_totals(image, coverage) == ({}, {})
    assert missed(coverage) == [("counters of all zones", at, f"not made: {at:#x}")]
    del image._objects["vm_zone_stat"]
    assert read_zone_totals(image, coverage) == ({}, {})
    assert (coverage.read, coverage.unreadable) == (0, 1)


def test_words_of_counters() -> None:
    image = kernel()
    found = list(node_stat_words(image, 3))
    at = NODES[3] + image.type("struct pglist_data").member("vm_stat").offset
    names = ("NR_ONE", "NR_TWO", "NR_THREE")
    assert found == [CounterWord("vm_stat", name, at + 8 * n, 8) for n, name in enumerate(names)]
    assert list(zone_stat_words(image, 1)) == [
        CounterWord("zone_stat", item, NODES[1] + at, 8)
        for item, at in (
            ("NR_FREE[ZONE_DMA]", 8),
            ("NR_MLOCK[ZONE_DMA]", 16),
            ("NR_FREE[ZONE_NORMAL]", 32),
            ("NR_MLOCK[ZONE_NORMAL]", 40),
        )
    ]
