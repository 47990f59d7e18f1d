# SPDX-License-Identifier: LGPL-2.1-or-later
"""The bits of preempt counts, as include/linux/preempt.h of each kernel has them."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.sched import cpu_curr
from support.guests import DEBIAN_KERNELS, Lab
from support.made_memory import BASE, MadeMemory

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.kernel import preempt
from memcg_inspect.linux.kernel.preempt import in_interrupt_handler

PREEMPT, SOFTIRQ, BH_DISABLE = 1, 0x100, 0x200
#: Hardirqs by series: bits that tell whether interrupts are disabled come first since 7.3.
HARDIRQ = {"6.1": 1 << 16, "6.12": 1 << 16, "7.2": 1 << 16, "7.3": 1 << 24}
#: Four bits count hardirqs.
NMI = 1 << 4


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_which_bits_tell_of_handlers(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prog = lab.image(kernel).program()
    task, one = cpu_curr(prog, 0), HARDIRQ[kernel]

    def told(count: int) -> bool | None:
        monkeypatch.setattr(preempt, "_preempt_count", lambda image, cpu: count)
        return in_interrupt_handler(image_of(prog), 0, task)

    handles = (SOFTIRQ, one, 2 * one, 8 * one, one + NMI * one, SOFTIRQ + BH_DISABLE)
    assert {told(count) for count in handles} == {True}
    assert {told(count) for count in (0, 3 * PREEMPT, BH_DISABLE, NMI * one)} == {False}


#: Where the per-CPU variables of two CPUs are.
OFFSETS = (BASE + 0x1000, BASE + 0x2000)
TASK = BASE + 0x3000


@pytest.fixture
def made() -> MadeMemory:
    made = MadeMemory()
    made.variable("__per_cpu_offset", made.array(made.word, 2), BASE)
    for cpu, offset in enumerate(OFFSETS):
        made.write(BASE + 8 * cpu, offset)
    return made


def handlers(made: MadeMemory, *counts: int, of_task: int | None = None) -> list[bool | None]:
    """
    Return which CPUs handle an interrupt.

    :param counts: the preempt counts of the CPUs, which are at 8 in their per-CPU memory
    :param of_task: ``softirq_disable_cnt`` of their task, with CONFIG_PREEMPT_RT
    """
    members = [("pid", made.int)]
    if of_task is not None:
        members.append(("softirq_disable_cnt", made.int))
        made.write(TASK + 4, of_task, 4)
    task = made.at(made.struct("task_struct", members), TASK)
    for offset, count in zip(OFFSETS, counts, strict=True):
        made.write(offset + 8, count, 4)
    image = Image(made.prog)
    return [in_interrupt_handler(image, cpu, task) for cpu in range(len(counts))]


def test_where_the_count_of_a_cpu_is(made: MadeMemory) -> None:
    """In ``pcpu_hot`` from 6.2 to 6.14, elsewhere than on x86 in no variable."""
    assert handlers(made, SOFTIRQ, 0) == [None, None]
    hot = made.struct("pcpu_hot", [("current_task", made.word), ("preempt_count", made.int)])
    made.variable("pcpu_hot", hot, 0)
    assert handlers(made, SOFTIRQ, 0) == [True, False]
    made.variable("__preempt_count", made.int, 8)
    assert handlers(made, 0, 1 << 16) == [False, True]
    # Since 7.3.
    made.variable("local_interrupt_disable_state", made.int, 16)
    assert handlers(made, 1 << 16, 1 << 24) == [False, True]


def test_softirqs_are_counted_by_task_with_preempt_rt(made: MadeMemory) -> None:
    made.variable("__preempt_count", made.int, 8)
    assert handlers(made, SOFTIRQ, 1 << 16, of_task=0) == [False, True]
    assert handlers(made, 0, 0, of_task=SOFTIRQ) == [True, True]
    assert handlers(made, 0, 0, of_task=BH_DISABLE) == [False, False]
