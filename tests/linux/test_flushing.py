# SPDX-License-Identifier: LGPL-2.1-or-later
"""
When a reader of memory.stat flushes the counters, and how far they can be off if it does not.

The numbers are those of memcg_rstat_updated() and memcg_vmstats_needs_flush() of mm/memcontrol.c,
with four CPUs and MEMCG_CHARGE_BATCH of 64.
"""

from __future__ import annotations

import pytest
from drgn import FaultError, Object, Program, sizeof
from support.guests import Lab
from support.layouts import MadeImage
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_flush import FlushRule
from memcg_inspect.linux.mm.mmzone import online_cpus

BATCH, CPUS = 64, 4
VARIABLES, MEMCG = 0xFFFFFFFF82000000, 0xFFFF888000000000


def due_after(prog: Program, counter: Object, *updates: int) -> list[bool | None]:
    """Return whether a flush of the root is due after so many updates."""
    overlay, found = Overlay(prog), []
    for number in updates:
        data = number.to_bytes(sizeof(counter), "little")
        overlay.write((Write(counter.address_ or 0, data),))
        found.append(FlushRule(image_of(prog)).is_due(prog["root_mem_cgroup"].read_()))
    return found


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", ["7.3"])
def test_each_memcg_has_its_own_updates(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    assert online_cpus(image_of(prog)) == tuple(range(CPUS))
    counter, most = prog["root_mem_cgroup"].vmstats.stats_updates.counter, BATCH * CPUS
    assert due_after(prog, counter, 0, most, most + 1) == [False, False, True]


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", ["7.3"])
def test_counters_are_off_by_what_is_not_flushed(lab: Lab, kernel: str) -> None:
    rule = FlushRule(image_of(lab.image(kernel, "4", "mixed").program()))
    # The threshold, and 63 updates on each CPU. An update is less than two pages.
    assert rule.most_updates == 4 * 64 + 4 * 63
    assert rule.bound("NR_FILE_PAGES") == 508
    assert rule.bound("NR_SLAB_RECLAIMABLE_B") == 508 * 8192
    assert rule.bound("NR_KERNEL_STACK_KB") == 508 * 8


@pytest.mark.image
def test_all_memcgs_shared_one_number_of_updates(lab: Lab) -> None:
    """Up to 6.7, stats_flush_threshold counts whole batches."""
    prog = lab.image("6.1", "4", "mixed").own_program()
    counter = prog["stats_flush_threshold"].counter
    assert due_after(prog, counter, 0, CPUS, CPUS + 1) == [False, False, True]
    rule = FlushRule(image_of(prog))
    # For each CPU, a unit of the threshold, which is less than two batches, and a batch.
    assert rule.most_updates == 4 * 127 + 4 * 64
    assert rule.bound("NR_FILE_PAGES") == 764


def test_without_the_variable_it_is_not_known() -> None:
    """Without CONFIG_KALLSYMS_ALL, an image has no symbols of variables."""
    image = MadeImage()
    image.declare("struct cpumask { unsigned long bits[1]; };")
    image.declare("struct memcg_vmstats { long state; }; struct mem_cgroup { long flags; };")
    image.variable("__cpu_online_mask", "struct cpumask", 0xFFFFFFFF82000000)
    image.words(0xFFFFFFFF82000000, 0b11)
    memcg = Object(image.prog, "struct mem_cgroup *", 0xFFFF888000000000)
    assert FlushRule(image).is_due(memcg) is None


def made_kernel(stats: str) -> MadeImage:
    """Return a kernel with two possible CPUs, one of which is online."""
    image = MadeImage()
    image.declare("struct cpumask { unsigned long bits[1]; }; struct atomic { int counter; };")
    image.declare(f"struct memcg_vmstats {{ {stats} }};")
    image.declare("struct mem_cgroup { long id; struct memcg_vmstats *vmstats; };")
    image.variable("__cpu_online_mask", "struct cpumask", VARIABLES)
    image.words(VARIABLES, 0b10)
    image.words(MEMCG, 0, MEMCG + 64)
    return image


def test_updates_of_a_memcg() -> None:
    """The threshold is of the CPUs that are online, and each possible one may hold some back."""
    image = made_kernel("long state; struct atomic stats_updates;")
    rule = FlushRule(image)
    assert rule.most_updates == 64 + 2 * 63
    memcg = image.pointer("struct mem_cgroup *", MEMCG)
    for updates, is_due in ((0, False), (64, False), (65, True)):
        image.words(MEMCG + 64, 1000, updates)
        assert rule.is_due(memcg) is is_due
    assert rule.bound("NR_FILE_PAGES") == 190
    assert rule.bound("MEMCG_PERCPU_B") == 190 * 2 * 4096
    assert rule.bound("NR_KERNEL_STACK_KB") == 190 * 2 * 4
    with pytest.raises(FaultError):
        rule.is_due(image.pointer("struct mem_cgroup *", MEMCG + 4096))


def test_updates_of_all_memcgs() -> None:
    image = made_kernel("long state;")
    image.variable("stats_flush_threshold", "struct atomic", VARIABLES + 64)
    rule, memcg = FlushRule(image), image.pointer("struct mem_cgroup *", MEMCG)
    assert rule.most_updates == 127 + 2 * 64
    for updates, is_due in ((0, False), (1, False), (2, True)):
        image.words(VARIABLES + 64, updates)
        assert rule.is_due(memcg) is is_due
