# SPDX-License-Identifier: LGPL-2.1-or-later
"""Other configurations of guests: allocation profiling, cgroup v1, KFENCE, other topologies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support.exact import check_exact, not_kept
from support.guest_files import numbers, path_of
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, GuestImage, Lab
from support.identity_table import check_table, found_in

from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of

pytestmark = pytest.mark.image

PAGE = 4096
#: ``CONFIG_KFENCE_NUM_OBJECTS`` of Debian's kernels.
KFENCE_OBJECTS = 255


class Variant(NamedTuple):
    """
    One configuration of a guest.

    :ivar missing: identities that are not kept on it, beside those of its kernel
    :ivar kept: identities that are kept on it, although its kernel does not by itself
    :ivar is_so: returns whether the guest has this configuration
    """

    name: str
    kernel: str
    nodes: str
    more: dict[str, Any]
    is_so: Callable[[GuestImage], bool]
    missing: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


def profiles(image: GuestImage) -> bool:
    """Far more memory is profiled than would be without, where there is nothing but heads."""
    lines = (image.guest / "2/proc/allocinfo").read_text().splitlines()[2:]
    return sum(int(line.split()[0]) for line in lines) > 1 << 20


def compresses(image: GuestImage) -> bool:
    key = image.program(dwarf=True)["mem_profiling_compressed"].key
    return profiles(image) and key.enabled.counter.value_() > 0


def is_v1(image: GuestImage) -> bool:
    return (image.guest / "2/cgroup/memory.usage_in_bytes").exists()


def has_kfence(image: GuestImage) -> bool:
    """Return whether KFENCE has returned objects that are in use."""
    prog = image.program(dwarf=True)
    allocated, objects = prog["KFENCE_OBJECT_ALLOCATED"], prog["kfence_metadata"]
    return any(objects[i].state == allocated for i in range(KFENCE_OBJECTS))


def has_nodes_of_three_cpus(image: GuestImage) -> bool:
    prog = image.program(dwarf=True)
    masks = [prog["node_to_cpumask_map"][nid].bits[0].value_() for nid in (0, 1)]
    return masks == [0b000111, 0b111000]


def has_eight_nodes(image: GuestImage) -> bool:
    zones = (image.guest / "2/proc/zoneinfo").read_text()
    return all(f"Node {nid}, zone" in zones for nid in range(8))


PROFILING = {"append": "sysctl.vm.mem_profiling=1"}
#: What there is with profiling only.
TAGS = frozenset({"alloc_tags"})
VARIANTS = [
    variant
    for variant in (
        Variant("profiling", "7.3-lab", "4", PROFILING, profiles, kept=TAGS),
        Variant("profiling", "6.12-lab", "4", PROFILING, profiles, kept=TAGS),
        Variant(
            "compressed profiling",
            "7.3-lab",
            "4",
            {"append": "sysctl.vm.mem_profiling=1,compressed"},
            compresses,
            kept=TAGS,
        ),
        Variant(
            "cgroup v1",
            "7.3-lab",
            "4",
            {"cgroup": "v1"},
            is_v1,
            frozenset({"zswap", "sock", "sock_bytes"}),
            kept=frozenset({"kmem_usage", "tcpmem"}),
        ),
        Variant("kfence", "7.2", "4", {"append": "kfence.sample_interval=1"}, has_kfence),
        Variant("six CPUs", "7.3", "2", {"cpus": 6}, has_nodes_of_three_cpus),
        Variant("eight nodes", "7.3", "8", {}, has_eight_nodes),
    )
    if variant.kernel in (*DEBIAN_KERNELS, *BUILT_KERNELS)
]


def guest_image(lab: Lab, variant: Variant) -> GuestImage:
    return lab.image(variant.kernel, variant.nodes, "mixed", **variant.more)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.kernel}-{v.name}")
def test_every_identity_is_exact(lab: Lab, variant: Variant) -> None:
    image = guest_image(lab, variant)
    assert variant.is_so(image)
    check_exact(image.report(), (not_kept(variant.kernel) | variant.missing) - variant.kept)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.kernel}-{v.name}")
def test_table(lab: Lab, variant: Variant, request: pytest.FixtureRequest) -> None:
    found = found_in([guest_image(lab, variant).report()])
    column = f"{variant.kernel}, {variant.name}"
    check_table(column, found, request.config.getoption("--write-docs"))


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k in ("6.12-lab", "7.3-lab")])
def test_counters_of_cgroup_v1(lab: Lab, kernel: str) -> None:
    """On v1 kernel memory has its own page counter, which the guest shows."""
    image = lab.image(kernel, "4", "mixed", cgroup="v1")
    snapshot = collect(image_of(image.program()))
    paths = {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}
    compared, moved = 0, []
    for name in ("memory.usage_in_bytes", "memory.kmem.usage_in_bytes"):
        first, second = (
            {path_of(f, folder): int(f.read_text()) for f in folder.rglob(name)}
            for folder in (image.guest / "1/cgroup", image.guest / "2/cgroup")
        )
        assert set(second) == set(paths)
        for path, value in second.items():
            if path == "/" or first.get(path) != value:
                continue
            claim = snapshot.counters.hierarchical(paths[path], "MEMCG_KMEM")
            assert claim is not None
            pages = snapshot.usage[paths[path]] if "kmem" not in name else sum(claim)
            if pages * PAGE == value:
                compared += value > 0
            else:
                moved.append((path, name, pages * PAGE, value))
    # What stood still for seconds may be freed a moment before the freeze.
    assert compared > len(moved), moved
    assert not numbers(image.guest / "2/cgroup", "memory.current")
