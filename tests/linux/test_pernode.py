# SPDX-License-Identifier: LGPL-2.1-or-later
"""How the series that accounts kernel memory by node splits charges, in memory made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.layouts import MadeImage

from memcg_inspect.linux.mm.memcontrol import accounting
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.linux.mm.percpu import PcpuArea, PcpuChunk
from memcg_inspect.linux.mm.pernode import (
    accounts_by_node,
    posted_percpu_nodes,
    posted_zswap_nodes,
    read_objcg_sets,
)
from memcg_inspect.model import Coverage, Objcg, ObjcgSet, Unreadable

SETS = tuple(0xFFFF888030000000 + 4096 * n for n in range(3))
MISSING = 0xFFFF888077700000
CHUNK = PcpuChunk(1, 0, 4, 0, 0, 0, 0, 4 * 4096)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("memcg", False), ("objcg-per-node", False), ("kmem-per-node", True)],
)
def test_kernels_that_account_by_node(kind: str, expected: bool) -> None:
    image = MadeImage()
    image.given[accounting] = kind
    assert accounts_by_node(image) is expected


@pytest.mark.parametrize(
    ("offset", "size", "expected"),
    [
        (0, 8, {0: 16}),
        (4096, 4096, {0: 4096, 1: 4096}),
        # From the end of page 0 to the beginning of page 1: all is booked to page 0.
        (4000, 200, {0: 400}),
        (4000, 4096, {0: 8192}),
        # The size has a page and 4 bytes.
        (4000, 4100, {0: 8192 + 4, 1: 4}),
        (4096, 8196, {0: 4096, 1: 4096 + 8192, 2: 4, 3: 4}),
    ],
)
def test_percpu_memory_by_the_posted_rule(offset: int, size: int, expected: dict[int, int]) -> None:
    """Page 0 is on node 0 for both CPUs, page 1 on 0 and 1, page 2 on 1, and page 3 on 2 and 3."""
    nodes = ({0: 2}, {0: 1, 1: 1}, {1: 2}, {2: 1, 3: 1})
    reader = SimpleNamespace(image=MadeImage(), page_nodes=lambda chunk, page: nodes[page])
    area = PcpuArea(CHUNK, offset, size, 0, 0)
    assert posted_percpu_nodes(reader, area) == expected  # type: ignore[arg-type]


def test_entries_of_zswap_by_the_posted_rule() -> None:
    """The data begins on the first node."""
    assert posted_zswap_nodes({1: 100, 0: 3000}) == {1: 3100}
    assert posted_zswap_nodes({0: 7}) == {0: 7}
    assert posted_zswap_nodes({}) == {}


def objcg(address: int, its_set: int) -> Objcg:
    return Objcg(address, 0, 0, False, 0, set=its_set)


def test_sets_of_obj_cgroups() -> None:
    image, coverage = MadeImage(), Coverage()
    image.declare(
        """
        struct atomic { int counter; };
        struct refcount { struct atomic refs; };
        struct obj_cgroup_set { struct refcount refcnt; void *objcgs[4]; };
        """
    )
    image.given[possible_nodes] = range(2)
    for n, address in enumerate(SETS):
        image.words(address, 5 + n, 0x1000 * n, 0x1000 * n + 1, 99)
    members = [
        objcg(n, its_set) for n, its_set in enumerate((SETS[2], 0, SETS[0], SETS[2], MISSING))
    ]
    assert read_objcg_sets(image, members, coverage) == {
        SETS[2]: ObjcgSet(SETS[2], 7, {0: 0x2000, 1: 0x2001}),
        SETS[0]: ObjcgSet(SETS[0], 5, {0: 0, 1: 1}),
    }
    assert (coverage.read, coverage.unreadable) == (2, 1)
    [missed] = coverage.examples
    at = MISSING + 8
    assert missed == Unreadable("set of obj_cgroups", at, f"not made: {at:#x}")
