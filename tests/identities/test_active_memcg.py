# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs that tasks charge instead of their own.

In the workload ``loop``, the worker of a loop device sleeps while it writes for a memcg.
"""

from __future__ import annotations

import pytest
from drgn import Object
from labkit import kernels, kmodules
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.planters import planters_of
from support.planting import Subject, ended

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.sched_mm import sets_active_memcg
from memcg_inspect.report import Report

pytestmark = pytest.mark.image


def loop(lab: Lab, kernel: str) -> GuestImage:
    modules = kmodules.with_dependencies(kernels.kernel(kernel), "loop")
    return lab.image(kernel, "2", "loop", modules=modules)


def statuses(report: Report) -> set[str]:
    return {row.status for row in report.rows if row.identity == "active_memcg"}


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_a_worker_of_a_loop_device(lab: Lab, kernel: str) -> None:
    image = loop(lab, kernel)
    subject = Subject(image.program())
    [active] = subject.snapshot.active_memcgs
    assert subject.path(active.memcg) == "/loop/writer"
    assert active.name.startswith("kworker/")
    assert (active.function, active.why_unknown) == ("loop_process_work", None)
    report = image.report()
    assert not report.findings
    assert statuses(report) == {"exact"}


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_a_pointer_that_was_left_behind(lab: Lab, kernel: str) -> None:
    """The worker excuses no other task, and a freed memcg is found in the worker itself."""
    subject = Subject(loop(lab, kernel).program())
    for planter in planters_of("active_memcg"):
        fault = planter.plant(subject, 0)
        now = subject.audit(fault)
        assert ended(subject.report, "active_memcg", fault, now).outcome == "found"
    [active] = subject.snapshot.active_memcgs
    task = Object(subject.prog, "struct task_struct *", active.task)
    freed = subject.put(task.active_memcg, active.memcg + 64)
    now = subject.audit(fault._replace(writes=(freed,)))
    assert {f.kind for f in now.findings if f.identity == "active_memcg"} == {"freed-active-memcg"}


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_functions_that_set_the_pointer(lab: Lab, kernel: str) -> None:
    """They are told by their code: these do, in the sources of each kernel, and these do not."""
    image = Image(loop(lab, kernel).program())
    # One function has had three names.
    split = {
        "6.1": "split_huge_page_to_list",
        "6.12": "split_huge_page_to_list_to_order",
        "7.2": "__folio_split",
        "7.3": "__folio_split",
    }
    names = {split[kernel]}
    names |= {"mem_cgroup_css_alloc", "inotify_handle_inode_event", "fanotify_handle_event"}
    names |= {"loop_process_work", "bpf_map_kmalloc_node"}
    others = {"schedule", "worker_thread", "vfs_write", "kthread", "do_exit", "do_syscall_64"}
    told = {name: sets_active_memcg(image, image.symbol(name).address) for name in names | others}
    assert told == dict.fromkeys(names, True) | dict.fromkeys(others, False)
