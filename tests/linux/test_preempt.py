# SPDX-License-Identifier: LGPL-2.1-or-later
"""The bits of preempt counts, as include/linux/preempt.h of each kernel has them."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.sched import cpu_curr
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
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
