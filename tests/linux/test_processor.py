# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a task that does not run has saved."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.pid import for_each_task
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.arch.processor import saved_stack_pointer
from memcg_inspect.linux.kernel.stacktrace_words import stack_of


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_stack_pointers_of_tasks_that_sleep(lab: Lab, kernel: str) -> None:
    """__switch_to_asm() saves it below the frame of its caller, which drgn unwinds to."""
    prog = lab.image(kernel).program()
    image, sleeping = image_of(prog), 0
    for task in for_each_task(prog):
        if task.on_cpu:
            continue
        sp = saved_stack_pointer(image, task)
        start, size = stack_of(image, task)
        assert sp is not None
        assert start <= sp <= prog.stack_trace(task)[0].sp < start + size
        sleeping += 1
    assert sleeping > 20
