# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs that tasks charge instead of their own.

In the workload ``loop``, the worker of a loop device sleeps while it writes for a memcg.
"""

from __future__ import annotations

import pytest
from drgn import Object
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.sched import cpu_curr
from labkit import kernels, kmodules
from support.findings import named
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.planters import planters_of
from support.planters.active_memcg import interrupt_of
from support.planting import Subject, ended

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch.entry import is_outermost
from memcg_inspect.linux.arch.processor import is_kernel_address
from memcg_inspect.linux.kernel.preempt import in_interrupt_handler
from memcg_inspect.linux.kernel.sched_mm import sets_active_memcg
from memcg_inspect.report import Report

pytestmark = pytest.mark.image


def loop(lab: Lab, kernel: str) -> GuestImage:
    modules = kmodules.with_dependencies(kernels.kernel(kernel), "loop")
    return lab.image(kernel, "2", "loop", modules=modules)


def statuses(report: Report) -> set[str]:
    return {row.status for row in report.rows if row.identity == "active_memcg"}


@pytest.mark.long
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


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_one_function_sets_one_pointer(lab: Lab, kernel: str) -> None:
    """The task in mkdir() charges the parent; no interrupt of its CPU charges anything."""
    image = lab.image(kernel, "4", "churn", freeze="in:wb_domain_init", seed=0)
    subject, prog = Subject(image.program()), image.program(dwarf=True)
    traces = {cpu: prog.stack_trace(cpu_curr(prog, cpu)) for cpu in for_each_online_cpu(prog)}
    # Several CPUs can be there at once.
    cpu = next(cpu for cpu, trace in traces.items() if trace[0].name == "wb_domain_init")
    task = cpu_curr(prog, cpu).value_()
    assert in_interrupt_handler(Image(prog), cpu, cpu_curr(prog, cpu)) is False
    active = {one.task: one.function for one in subject.snapshot.active_memcgs}
    assert active[task] == "mem_cgroup_css_alloc"
    assert named(subject.report, "active_memcg") == set()
    fault = interrupt_of(subject, cpu)
    now = subject.audit(fault)
    assert ended(subject.report, "active_memcg", fault, now).outcome == "found"


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_cpus_that_handle_interrupts(lab: Lab, kernel: str) -> None:
    """The functions on a stack tell it independently of the preempt count."""
    image = lab.image(kernel, "4", "churn", freeze="in:update_process_times", seed=0)
    prog = image.program(dwarf=True)
    told: dict[str, set[bool | None]] = {"handles": set(), "does not": set()}
    for cpu in for_each_online_cpu(prog):
        task = cpu_curr(prog, cpu)
        trace = prog.stack_trace(task)
        names = [frame.name or "" for frame in trace]
        is_in_user_mode = not is_kernel_address(prog, trace[0].pc)
        if "update_process_times" in names:
            told["handles"].add(in_interrupt_handler(Image(prog), cpu, task))
        elif any(word in name for name in names for word in ("irq", "interrupt", "sysvec")):
            continue
        # A trace that ends early may lack the entry of an interrupt.
        elif is_in_user_mode or is_outermost(prog, names[-1], trace[-1].pc):
            told["does not"].add(in_interrupt_handler(Image(prog), cpu, task))
    assert told["handles"] == {True}
    assert told["does not"] <= {False}


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
    # copy_process() clears the pointer of the new task.
    others |= {"copy_process", "kernel_clone"}
    told = {name: sets_active_memcg(image, image.symbol(name).address) for name in names | others}
    assert told == dict.fromkeys(names, True) | dict.fromkeys(others, False)
