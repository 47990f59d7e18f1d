# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is read of each memcg, and memcgs that are not in the image."""

from __future__ import annotations

import pytest
from drgn import Object
from support.findings import by_path
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.collect.counters import (
    read_counters,
    read_lruvecs,
    read_page_counters,
    read_swap_entries,
    read_usage,
)
from memcg_inspect.collect.folds import Folds
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.model import Coverage


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_swap_entries_of_memcgs(lab: Lab, kernel: str) -> None:
    """A memcg whose ID is not in the image is missed, and has no number."""
    image, coverage = lab.image(kernel), Coverage()
    memcgs = list(by_path(image.report()).values())
    program = image.program()
    ids = {int(program["root_mem_cgroup"].id.id): 7}
    found = read_swap_entries(image_of(program), [*memcgs, 0x1000], ids, coverage)
    root = program["root_mem_cgroup"].value_()
    assert found == {memcg: 7 if memcg == root else 0 for memcg in memcgs}
    assert coverage.unreadable == 1


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_page_counters_of_memcgs(lab: Lab, kernel: str) -> None:
    """One that is not in the image is missed once, and the others are read all the same."""
    program, coverage = lab.image(kernel).program(), Coverage()
    image = image_of(program)
    memcgs = {
        at: Object(program, "struct mem_cgroup *", at) for at in read_memcgs(image, Coverage())
    }
    asked = [0x1000, *memcgs]
    usage = read_usage(image, asked, coverage)
    assert usage == {at: m.memory.usage.counter.value_() for at, m in memcgs.items()}
    assert any(usage.values())
    assert [(found.what, coverage.unreadable) for found in coverage.examples] == [
        ("page counter", 1)
    ]
    others = read_page_counters(image, asked, coverage)
    # On cgroup v2, the only other counter in use is that of swap entries.
    assert others == {(at, "swap"): m.swap.usage.counter.value_() for at, m in memcgs.items()}
    assert coverage.unreadable == 2


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_nodes_of_memcgs(lab: Lab, kernel: str) -> None:
    program, coverage = lab.image(kernel).program(), Coverage()
    image = image_of(program)
    memcgs = {
        at: Object(program, "struct mem_cgroup *", at) for at in read_memcgs(image, Coverage())
    }
    found = read_lruvecs(image, [0x1000, *memcgs], coverage)
    assert {cell: pn.value_() for cell, pn in found.items()} == {
        (at, nid): memcg.nodeinfo[nid].value_() for at, memcg in memcgs.items() for nid in range(4)
    }
    assert coverage.unreadable == len(possible_nodes(image))
    assert coverage.examples[0].what == "nodes of a memcg"


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_counters_of_some_memcgs(lab: Lab, kernel: str) -> None:
    """Those of others are unknown. One that is not in the image is missed, with its nodes."""
    program, coverage = lab.image(kernel).program(), Coverage()
    image = image_of(program)
    memcgs = read_memcgs(image, Coverage())
    folds = Folds(image)
    # The last ones have no children, whose counters would have to be subtracted.
    asked = [*list(memcgs)[-2:], 0x1000]
    reader = StatReader(image, dict.fromkeys(("MEMCG_SOCK", "NR_KERNEL_STACK_KB")))
    found = read_counters(image, reader, memcgs, coverage, asked, folds)
    assert found.nids == (0, 1, 2, 3)
    for at in asked[:2]:
        assert found.own(at, "MEMCG_SOCK", None) is not None
        for nid in (0, 1, 2, 3):
            assert found.own(at, "NR_KERNEL_STACK_KB", nid) is not None
    assert found.own(list(memcgs)[-3], "NR_KERNEL_STACK_KB", 0) is None
    # A memcg, and each node of it.
    assert coverage.read == 2 * (1 + 4)
    assert coverage.unreadable == 1 + len(possible_nodes(image))
    whats = {found.what for found in coverage.examples}
    assert whats == {"counters of a memcg", "counters of a memcg on a node"}
    assert folds.found.partial == {0x1000}
    assert folds.found.changed.keys() == folds.found.pending.keys() == set(asked[:2])
