# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counters of nodes that were read are counted, and those that are not in the image, too."""

from __future__ import annotations

import pytest
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.vmstat import read_node_stats, read_total_stats
from memcg_inspect.model import Coverage


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
