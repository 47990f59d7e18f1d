# SPDX-License-Identifier: LGPL-2.1-or-later
"""The files of the per-node kernel itself. Tests of the audit are in tests/collect."""

from pathlib import Path

import pytest
from labkit import images, kernels
from labkit.selftest import held, selftest
from support.guests import complaints

#: Run with --all only, which builds the kernel first.
pytestmark = pytest.mark.long


def told(image: Path) -> Path:
    return image.with_name(image.name + ".guest") / "2"


def by_node(folder: Path, key: str) -> dict[int, int]:
    """Return a line of memory.numa_stat as amounts by node."""
    lines = (folder / "memory.numa_stat").read_text().splitlines()
    cells = next(line.split()[1:] for line in lines if line.split()[0] == key)
    return {int(n[1:]): int(size) for n, size in (cell.split("=") for cell in cells)}


@pytest.mark.parametrize("nodes", ["1", "2", "4", "8", "2cpu+6mem"])
def test_the_nodes_are_the_whole(nodes: str) -> None:
    image = images.image("7.3-pernode", nodes, "mixed")
    assert complaints(image) == []
    checked = 0
    for numa in (told(image) / "cgroup").rglob("memory.numa_stat"):
        folder = numa.parent
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        assert sum(by_node(folder, "kernel").values()) == int(stat["kernel"]), folder
        checked += 1
    assert checked > 20


def test_interleaved_memory_is_on_nodes_without_cpus() -> None:
    image = images.image("7.3-pernode", "2cpu+6mem", "interleave")
    assert complaints(image) == []
    kernel = by_node(told(image) / "cgroup" / "interleave" / "tree", "kernel")
    assert all(kernel[nid] > 0 for nid in range(8))


@pytest.mark.parametrize("kernel", ["7.3-lab", "7.3-pernode"])
def test_what_must_hold_does(kernel: str) -> None:
    # the workload fails when it does not
    image = images.image(kernel, "2cpu+6mem", "kmem")
    assert complaints(image) == []


@pytest.mark.parametrize("kernel", ["7.3-lab", "7.3-pernode"])
def test_one_of_everything(kernel: str, tmp_path: Path) -> None:
    pieces = held(selftest(tmp_path, kernel, "all"))
    kinds = [kind for kind, _, _ in pieces]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "percpu": 7 * 3, "slab": 8 * 5, "pages": 8 * 5, "vmalloc": 3,
    }  # fmt: skip
    for kind, size, nodes in pieces:
        whole = {"percpu": 2 * size, "pages": 4096 << size}.get(kind, size)
        assert sum(nodes.values()) == whole, (kind, size, nodes)


@pytest.mark.parametrize(("stage", "memcg"), [("gone", "self/here"), ("removed", "self")])
def test_after_the_teardown_nothing_is_charged(stage: str, memcg: str, tmp_path: Path) -> None:
    image = selftest(tmp_path, "7.3-pernode", stage)
    # What is left over of pages waits in the stocks of two CPUs, a page for each node, and in
    # nr_charged_bytes, less than two pages. It goes with the memcg.
    left = by_node(told(image) / "cgroup" / memcg, "kernel")
    assert max(left.values()) <= 3 * 4096


@pytest.mark.parametrize("nodes", ["2", "2cpu+6mem"])
def test_stress(nodes: str) -> None:
    image = images.image("7.3-pernode", nodes, "stress")
    assert complaints(image) == []


@pytest.mark.parametrize("mistake", kernels.BROKEN)
def test_each_broken_kernel_boots_and_works(mistake: str) -> None:
    image = images.image(f"7.3-pernode-broken-{mistake}", "2cpu+6mem", "interleave")
    assert (told(image) / "cgroup" / "interleave" / "tree").exists()
