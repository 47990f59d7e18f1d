# SPDX-License-Identifier: LGPL-2.1-or-later
"""How many tasks that cannot be read may be at work, by what the runqueues of real guests say."""

from __future__ import annotations

import pytest
from drgn import Object, Program
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Overlay, change

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.sched_load import unread_at_work

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


def without(prog: Program, *gone: Object) -> int | None:
    """Return how many tasks are at work that cannot be read, if those of *gone* cannot."""
    addresses = {task.value_() for task in gone}
    known = [task for task in for_each_task(prog) if task.value_() not in addresses]
    return unread_at_work(Image(prog), known, addresses)


def at_work(task: Object) -> bool:
    """Return whether a task is on a queue, waits in state ``D``, or is woken up."""
    return bool(task.on_rq) or int(task.member_("__state")) & 0x602 in (2, 0x200)


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_each_task_may_be_missing(lab: Lab, kernel: str) -> None:
    """Those that sleep are not at work."""
    prog = lab.image(kernel, "4", "churn", freeze="busy", seed=1).program()
    fair = prog.symbol("fair_sched_class").address
    # A CPU that was stopped while it put a task on a queue, or took it off, may count another.
    more = without(prog) or 0
    assert more <= 4
    queued = 0
    for task in for_each_task(prog):
        found = without(prog, task) or 0
        assert found <= more + at_work(task), (task.comm, task.pid)
        if int(task.on_rq) == 1 and task.sched_class.value_() == fair:
            queued += 1
            assert found >= 1, (task.comm, task.pid)
    assert queued


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_a_queue_that_is_missing(lab: Lab, kernel: str) -> None:
    """The number of tasks on it tells all the same how many of them cannot be read."""
    prog = lab.image(kernel, "4", "mixed").program()
    overlay = Overlay(prog)
    runqueue = per_cpu(prog["runqueues"], 2)
    name = "h_nr_queued" if runqueue.cfs.type_.has_member("h_nr_queued") else "h_nr_running"
    queued = runqueue.cfs.member_(name)
    more = (change(queued, int(queued) + 3), change(runqueue.nr_running, 3))
    overlay.write(more)
    assert without(prog) == 0
    overlay.write((change(runqueue.cfs_tasks.next, 0x1000), change(runqueue.cfs_tasks.prev, 0)))
    assert without(prog) == 3
    overlay.clear()


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_what_the_runqueues_count(lab: Lab, kernel: str) -> None:
    """Of tasks that wait, only the sum over all CPUs says how many there are."""
    prog = lab.image(kernel, "4", "mixed").program()
    overlay = Overlay(prog)
    first, second = (per_cpu(prog["runqueues"], cpu) for cpu in (0, 3))
    assert without(prog) == 0
    for runqueue, more, expected in ((first, 5, 5), (second, -5, 0), (second, -7, 0)):
        waiting = runqueue.nr_uninterruptible
        overlay.write((change(waiting, (int(waiting) + more) % 2**64),))
        assert without(prog) == expected
    overlay.clear()
    overlay.write((change(second.nr_running, int(second.nr_running) + 2),))
    assert without(prog) == 2
    overlay.clear()
