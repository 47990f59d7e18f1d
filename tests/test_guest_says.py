# SPDX-License-Identifier: LGPL-2.1-or-later
"""What was read is held against what the guest's own files said before it was frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BUILT_KERNELS, DEBIAN_KERNELS, Lab

from memcg_inspect.collect import collect

KERNELS = [k for k in (*DEBIAN_KERNELS, *BUILT_KERNELS) if k.startswith("7.3")]
NUMA_STAT = {
    "slab_reclaimable": "NR_SLAB_RECLAIMABLE_B",
    "slab_unreclaimable": "NR_SLAB_UNRECLAIMABLE_B",
}

pytestmark = pytest.mark.image


def numa_stat(folder: Path) -> dict[tuple[str, str, int], int]:
    """memory.numa_stat of every memcg, by (path, name, node)."""
    values = {}
    for file in folder.rglob("memory.numa_stat"):
        path = "/" + str(file.parent.relative_to(folder)).removeprefix(".")
        for line in file.read_text().splitlines():
            name, *nodes = line.split()
            for node in nodes:
                nid, value = node.removeprefix("N").split("=")
                values[path, name, int(nid)] = int(value)
    return values


@pytest.mark.parametrize("nodes", ["1", "4", "2cpu+6mem"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_numa_stat_is_folded_plus_pending(lab: Lab, kernel: str, nodes: str) -> None:
    """memory.numa_stat flushes, and omits what the object stocks hold."""
    image = lab.image(kernel, nodes)
    first, second = numa_stat(image.guest / "1/cgroup"), numa_stat(image.guest / "2/cgroup")
    snapshot = collect(image.program())
    by_path = {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}
    compared = 0
    for (path, name, nid), value in second.items():
        if name not in NUMA_STAT or first.get((path, name, nid)) != value:
            continue  # it did not stand still
        claim = snapshot.counters.hierarchical(by_path[path], NUMA_STAT[name], nid)
        assert claim is not None
        assert (path, name, nid, sum(claim)) == (path, name, nid, value)
        compared += value > 0
    assert compared >= 4
