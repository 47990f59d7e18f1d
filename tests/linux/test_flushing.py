# SPDX-License-Identifier: LGPL-2.1-or-later
"""
When a reader of memory.stat flushes the counters, and how far they can be off if it does not.

The numbers are those of memcg_rstat_updated() and memcg_vmstats_needs_flush() of mm/memcontrol.c,
with four CPUs and MEMCG_CHARGE_BATCH of 64.
"""

from __future__ import annotations

import pytest
from drgn import Object, Program, sizeof
from support.guests import Lab
from support.layouts import MadeImage
from support.planting import Overlay, Write

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_flush import FlushRule
from memcg_inspect.linux.mm.mmzone import online_cpus

BATCH, CPUS = 64, 4


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
