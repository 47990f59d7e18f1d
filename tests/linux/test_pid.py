# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which task has a PID, in which namespace."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.pid import find_task, for_each_task
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Overlay, change

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.pid import task_in_namespace

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

#: ``PROC_PID_INIT_INO`` of include/uapi/linux/nsfs.h, or include/linux/proc_ns.h.
INIT_NAMESPACE = 0xEFFFFFFC
OTHER = 0xF0000123


def test_tasks_of_the_first_namespace(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    for task in list(for_each_task(prog))[::9]:
        pid = int(task.pid)
        assert find_task(prog, pid).value_() == task.value_()
        assert task_in_namespace(Image(prog), pid, INIT_NAMESPACE) == task.value_()
        assert task_in_namespace(Image(prog), pid, OTHER) is None
    assert task_in_namespace(Image(prog), 1 << 22, INIT_NAMESPACE) is None


def test_a_task_of_a_container(lab: Lab, kernel: str) -> None:
    """It has a PID of the machine, too, and another task of the machine has the one it knows."""
    prog = lab.image(kernel, "4", "mixed").program()
    one, other = [task for task in for_each_task(prog) if task.mm][:2]
    overlay, own = Overlay(prog), int(other.pid)
    overlay.write(
        (
            change(prog["init_pid_ns"].ns.inum, OTHER),
            change(one.thread_pid.numbers[0].nr, own),
            change(other.thread_pid.numbers[0].nr, 1 << 21),
        )
    )
    assert task_in_namespace(Image(prog), own, OTHER) == one.value_()
    assert task_in_namespace(Image(prog), own, INIT_NAMESPACE) is None
    # A task that is being released has none.
    overlay.write((change(one.thread_pid, 0),))
    assert task_in_namespace(Image(prog), own, OTHER) is None
    overlay.clear()
