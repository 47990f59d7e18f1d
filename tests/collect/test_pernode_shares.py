# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Who pays for each part of a charge that is split by node.

The entries and obj_cgroups are written down here. ``tests/collect/test_pernode_audit.py`` and
``tests/collect/test_straddling.py`` run real kernels that account by node.
"""

from __future__ import annotations

from collections import Counter

import pytest
from support.guests import Lab

from memcg_inspect.collect.owners import read_owners
from memcg_inspect.collect.pernode import PerNode, ZswapShare
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.pernode import posted_percpu_nodes
from memcg_inspect.linux.mm.zswap import ZswapEntry
from memcg_inspect.model import NUMA_NO_NODE, Misplaced, Objcg

MEMCG, OTHER = 0x10, 0x20
#: The obj_cgroups of a memcg for node 0 and 1, which know each other, and an older one.
ON_0, ON_1, OLD = 0x1000, 0x1001, 0x1F00
UNKNOWN, ENTRY = 0x9000, 0xE000

OBJCGS = {
    objcg.address: objcg
    for objcg in (
        Objcg(ON_0, MEMCG, 0, False, 0, memcg_refs=1, siblings=(ON_0, ON_1, 0)),
        Objcg(ON_1, MEMCG, 1, False, 0, memcg_refs=1, siblings=(ON_0, ON_1, 0)),
        Objcg(OLD, MEMCG, 0, False, 0),
        Objcg(0x2000, OTHER, 0, False, 0),
        Objcg(0x3000, 0x30, 1, False, 0, siblings=(0x3100, 0x3000)),
    )
}


def entry(length: int, objcg: int, beyond: int = 0, nid: int = NUMA_NO_NODE) -> ZswapEntry:
    return ZswapEntry(ENTRY, length, 0, objcg, beyond=beyond, beyond_nid=nid)


def test_the_payer_of_a_part() -> None:
    """Siblings come first, then the current obj_cgroup of the memcg for the node."""
    whole, part = PerNode(OBJCGS, True), PerNode(OBJCGS, False)
    for splitter in (whole, part):
        assert splitter.payer(ON_0, 0) == ON_0
        assert splitter.payer(ON_0, 1) == ON_1
        assert splitter.payer(ON_1, 0) == ON_0
        assert splitter.payer(OLD, 1) == ON_1
        assert splitter.payer(OLD, 0) == ON_0
        assert splitter.payer(UNKNOWN, 1) == UNKNOWN
        assert splitter.payer(0x3000, 0) == 0x3100  # which was not read itself
    # Node 2 has no sibling, node 3 and -1 none that could be looked up.
    for nid in (2, 3, NUMA_NO_NODE):
        assert whole.payer(ON_0, nid) == ON_0
        assert part.payer(ON_0, nid) == 0
    # The memcg holds no reference to its only obj_cgroup, so it is not the current one.
    assert whole.payer(0x2000, 0) == 0x2000
    assert part.payer(0x2000, 0) == 0


def test_data_that_stayed_where_it_was_stored() -> None:
    splitter = PerNode(OBJCGS, True)
    assert splitter.zswap(entry(900, ON_0), {0: 900}) == [ZswapShare(ON_0, 0, 900)]
    charges = splitter.charges()
    assert charges.posted == {"percpu": {}, "zswap": {}}
    assert charges.straddling == charges.misplaced == []


def test_data_on_two_nodes_differs_from_the_posted_rule() -> None:
    """The posted rule books all of it to the node where the data begins."""
    splitter = PerNode(OBJCGS, True)
    found = splitter.zswap(entry(900, ON_0, 300, 1), {0: 600, 1: 300})
    assert found == [ZswapShare(ON_0, 0, 600), ZswapShare(ON_1, 1, 300)]
    found = splitter.zswap(entry(50, ON_1, 20, 0), {1: 30, 0: 20})
    assert found == [ZswapShare(ON_1, 1, 30), ZswapShare(ON_0, 0, 20)]
    charges = splitter.charges()
    assert charges.posted["zswap"] == {
        (ON_0, 0): 300 - 20,
        (ON_1, 1): -300 + 20,
    }
    assert charges.posted["percpu"] == {}
    assert charges.straddling == [
        Misplaced("zswap", ENTRY, ON_0, 0, 1, 300),
        Misplaced("zswap", ENTRY, ON_1, 1, 0, 20),
    ]
    assert charges.misplaced == []


def test_an_older_obj_cgroup_still_pays_for_the_first_node() -> None:
    splitter = PerNode(OBJCGS, True)
    found = splitter.zswap(entry(900, OLD, 300, 1), {0: 600, 1: 300})
    assert found == [ZswapShare(OLD, 0, 600), ZswapShare(ON_1, 1, 300)]


def test_data_that_was_moved_is_paid_for_as_recorded() -> None:
    """zs_compact() moves data. The parts that are on another node than their payer are told."""
    splitter = PerNode(OBJCGS, True)
    found = splitter.zswap(entry(900, ON_0, 300, 1), {1: 500, 0: 400})
    assert found == [
        ZswapShare(ON_0, 1, 500),
        ZswapShare(ON_0, 0, 100),
        ZswapShare(ON_1, 0, 300),
    ]
    assert splitter.charges().misplaced == [
        Misplaced("zswap", ENTRY, ON_0, 0, 1, 500),
        Misplaced("zswap", ENTRY, ON_1, 1, 0, 300),
    ]
    assert splitter.charges().straddling == []
    assert splitter.charges().posted == {"percpu": {}, "zswap": {}}


def test_data_that_begins_where_it_did_may_have_been_moved() -> None:
    """As much is recorded for another node as is there, or it was moved."""
    for nodes in ({0: 900}, {0: 500, 1: 400}, {0: 600, 2: 300}):
        splitter = PerNode(OBJCGS, True)
        found = splitter.zswap(entry(900, ON_0, 300, 1), nodes)
        assert sum(share.bytes for share in found if share.payer == ON_0) == 600
        assert sum(share.bytes for share in found if share.payer == ON_1) == 300
        assert splitter.charges().straddling == []
        assert splitter.charges().misplaced


def test_data_of_one_node_that_was_moved_to_another() -> None:
    splitter = PerNode(OBJCGS, True)
    assert splitter.zswap(entry(900, ON_0), {1: 900}) == [ZswapShare(ON_0, 1, 900)]
    assert splitter.charges().misplaced == [Misplaced("zswap", ENTRY, ON_0, 0, 1, 900)]


def test_what_is_not_known_is_not_split() -> None:
    """Neither the payer nor the node may be known; an entry may also have no data."""
    splitter = PerNode(OBJCGS, True)
    nodes = {0: 600, 1: 300}
    found = splitter.zswap(entry(900, UNKNOWN, 300, 1), nodes)
    assert found == [ZswapShare(UNKNOWN, 0, 600), ZswapShare(UNKNOWN, 1, 300)]
    found = splitter.zswap(entry(900, ON_0), {NUMA_NO_NODE: 900})
    assert found == [ZswapShare(ON_0, NUMA_NO_NODE, 900)]
    assert splitter.zswap(entry(0, ON_0), {1: 0}) == [ZswapShare(ON_0, 1, 0)]
    charges = splitter.charges()
    assert charges.straddling == charges.misplaced == []


def test_the_second_payer_of_an_entry() -> None:
    splitter = PerNode(OBJCGS, True)
    assert splitter.second_payer(entry(900, ON_0, 300, 1)) == ON_1
    assert splitter.second_payer(entry(900, ON_0, 1, 1)) == ON_1
    assert splitter.second_payer(entry(900, ON_0, 0, 1)) is None
    assert splitter.second_payer(entry(900, UNKNOWN, 300, 1)) is None


@pytest.mark.image
def test_a_percpu_allocation_is_split_by_its_pages(lab: Lab) -> None:
    """Each node has one reference, whether data, or elements of the vector, or both are there."""
    image = image_of(lab.image("7.3", "4", "mixed").program())
    objcgs, reader, seen = read_owners(image).objcgs, PercpuReader(image), Counter[bool]()
    for area in (area for chunk in reader.chunks() for area in reader.charged(chunk)):
        splitter = PerNode(objcgs, True)
        found = list(splitter.percpu(reader, area))
        data, metadata = reader.data_nodes(area), reader.metadata_nodes(area)
        kinds = {(entry.detail, entry.nid): amount.bytes for entry, amount in found}
        assert kinds == {
            **{("data", nid): size for nid, size in data.items() if size},
            **{("metadata", nid): size for nid, size in metadata.items() if size},
        }
        references = Counter(entry.nid for entry, amount in found for _ in range(amount.charges))
        assert references == dict.fromkeys({*+data, *+metadata}, 1)
        assert {entry.kind for entry, _ in found} == {"percpu"}
        assert {e.payer for e, _ in found} == {splitter.payer(area.objcg, e.nid) for e, _ in found}
        # The posted rule books a page of the size to the node of a page of the range.
        differs = Counter(+data) != posted_percpu_nodes(reader, area)
        assert splitter.charges().posted["zswap"] == {}
        assert any(splitter.charges().posted["percpu"].values()) == differs
        assert all(found[:2] == ("percpu", area.element) for found in splitter.charges().straddling)
        assert sum(splitter.charges().posted["percpu"].values()) == 0
        seen[metadata.keys() <= data.keys()] += 1
    # A unit of the chunks is on the node of its CPU, and the vector is on any node.
    assert seen[True] > 10
