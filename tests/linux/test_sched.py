# SPDX-License-Identifier: LGPL-2.1-or-later
"""Tasks are those of drgn's helpers, also where lists are damaged, and so is what they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drgn import FaultError, Object, Program, cast
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.missing_pages import excluded
from support.planting import Overlay, Write, change

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel import sched_frag
from memcg_inspect.linux.kernel.sched import (
    caches_objcg,
    find_tasks,
    find_tasks_and_dead,
    has_mm,
    read_task,
    read_tasks,
    read_threads,
    task_of_stack,
)
from memcg_inspect.linux.kernel.sched_frag import task_fragments
from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.model import Coverage
from memcg_inspect.model_tasks import TaskCharge

pytestmark = [
    pytest.mark.image,
    pytest.mark.each_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

#: ``LIST_POISON1`` of include/linux/poison.h: no address.
POISON = 0xDEAD000000000100
#: Of include/linux/sched.h.
TASK_NEW, PF_KTHREAD, PF_VCPU = 0x800, 0x200000, 1


@pytest.fixture
def guest(lab: Lab, kernel: str) -> GuestImage:
    return lab.image(kernel, "4", "mixed")


@pytest.fixture
def prog(guest: GuestImage) -> Program:
    return guest.program()


@pytest.fixture
def overlay(prog: Program) -> Iterator[Overlay]:
    overlay = Overlay(prog)
    yield overlay
    overlay.clear()


def addresses(tasks: Iterator[Object] | list[Object]) -> set[int]:
    return {task.value_() for task in tasks}


def found(prog: Program) -> tuple[set[int], list[FaultError]]:
    """Return the tasks that are found, and what could not be read."""
    faults: list[FaultError] = []
    tasks = find_tasks(Image(prog), faults.append)
    assert len(tasks) == len(addresses(tasks))
    return addresses(tasks), faults


def damage_table(prog: Program) -> Write:
    """Let the table of PIDs have a node that is none."""
    return change(prog["init_pid_ns"].idr.idr_rt.xa_head, POISON | 2)


def user(prog: Program) -> Object:
    """Return a task that has a memory of its own, sleeps, and is in a memcg below the root."""
    return next(t for t in for_each_task(prog) if t.mm and t.pid > 1 and t.member_("__state"))


def kernel_thread(prog: Program) -> Object:
    return next(t for t in for_each_task(prog) if t.flags & PF_KTHREAD)


def charge_of(prog: Program, task: Object) -> TaskCharge:
    return read_task(Image(prog), task.value_())


def test_a_damaged_table_of_pids_hides_no_task(prog: Program, overlay: Overlay) -> None:
    """Processes are on a list, too, and each has a list of its threads."""
    tasks = addresses(for_each_task(prog))
    assert found(prog) == (tasks, [])
    overlay.write((damage_table(prog),))
    assert found(prog) == (tasks, [])
    # A damaged list is read from its other end. The entry that cannot be read is among the tasks.
    overlay.write((change(prog["init_task"].tasks.next, POISON),))
    listed, faults = found(prog)
    assert listed > tasks
    assert len(faults) == 1


def test_a_process_whose_threads_cannot_be_found(prog: Program, overlay: Overlay) -> None:
    tasks, leader = list(for_each_task(prog)), user(prog).group_leader
    overlay.write((change(leader.signal, POISON), damage_table(prog)))
    listed, faults = found(prog)
    others = {t.value_() for t in tasks if t.group_leader == leader and t != leader}
    assert listed == addresses(tasks) - others
    assert faults


def test_a_pid_that_is_missing(guest: GuestImage) -> None:
    """Its task is on the list of processes."""
    prog = guest.own_program()
    tasks, task = addresses(for_each_task(prog)), user(prog).group_leader
    at = task.thread_pid.tasks[prog["PIDTYPE_PID"]].address_of_().value_()
    prog.add_memory_segment(at, 8, excluded, False)
    assert found(prog) == (tasks, [])
    # Of a process on the list, what leads to its threads is missing.
    at = prog["init_pid_ns"].child_reaper.signal.address_of_().value_()
    prog.add_memory_segment(at, 8, excluded, False)
    listed, faults = found(prog)
    assert listed == tasks
    assert faults


def test_a_dead_thread_is_on_the_queue_of_a_cpu(
    prog: Program, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """__exit_signal() has taken its PID, and it has not stopped for good."""
    tasks, dead = addresses(for_each_task(prog)), user(prog)
    head, node = per_cpu(prog["runqueues"], 2).cfs_tasks, dead.se.group_node
    links = [(head, node), (node, head)]
    overlay.write(
        (
            change(dead.thread_pid.tasks[prog["PIDTYPE_PID"]].first, 0),
            *(change(one.next, other.address_ or 0) for one, other in links),
            *(change(one.prev, other.address_ or 0) for one, other in links),
        )
    )
    faults: list[FaultError] = []
    assert addresses(find_tasks(Image(prog), faults.append)) == tasks - {dead.value_()}
    assert addresses(find_tasks_and_dead(Image(prog), faults.append)) == tasks
    assert faults == []
    # A queue that ends in a freed task is damage in a dump, and in a running kernel it is not.
    overlay.write((change(node.next, POISON),))
    assert addresses(find_tasks_and_dead(Image(prog), faults.append)) > tasks
    assert len(faults) == 1
    monkeypatch.setattr(Image, "is_moving", True)
    assert addresses(find_tasks_and_dead(Image(prog), faults.append)) > tasks
    assert len(faults) == 1


def test_what_is_read_of_each_task(prog: Program) -> None:
    coverage, subsys = Coverage(), prog["memory_cgrp_id"]
    read = {task.address: task for task in read_tasks(Image(prog), coverage)}
    tasks = list(for_each_task(prog))
    assert (coverage.read, coverage.unreadable) == (len(tasks), 0)
    assert read.keys() == addresses(tasks)
    for task in tasks:
        one = read[task.value_()]
        css = cast("unsigned long", task.cgroups.subsys[subsys]).value_()
        assert (one.pid, one.tgid, one.memcg) == (task.pid, task.tgid, css)
        assert one.comm == task.comm.string_().decode()
        assert one.active_memcg == task.active_memcg.value_()
        assert one.is_runnable == (task.member_("__state") == 0)
        assert not one.is_migrating
        assert read_task(Image(prog), one.address) == one
        if hasattr(task, "objcg"):
            word = task.objcg.value_()
            assert (one.objcgs, one.stale) == ((word & ~1,), bool(word & 1))
    assert {one.is_user for one in read.values()} == {True, False}


def test_a_task_that_cannot_be_read(prog: Program, overlay: Overlay) -> None:
    tasks, lost = addresses(for_each_task(prog)), user(prog)
    overlay.write((change(lost.cgroups, POISON),))
    coverage = Coverage()
    read = {task.address for task in read_tasks(Image(prog), coverage)}
    assert read == tasks - {lost.value_()}
    assert (coverage.read, coverage.unreadable) == (len(read), 1)
    assert coverage.examples[0].what == "task"


def test_all_readers_count_what_is_damaged(prog: Program, overlay: Overlay) -> None:
    """One task is unreadable at least, and what leads to others."""
    readers = (
        lambda image, coverage: list(read_tasks(image, coverage)),
        read_threads,
        lambda image, coverage: task_of_stack(image, 0, coverage),
    )
    overlay.write((damage_table(prog), change(prog["init_task"].tasks.next, POISON)))
    for read in readers:
        coverage = Coverage()
        read(Image(prog), coverage)
        # The damaged table, and what the damaged list leads to.
        assert coverage.unreadable == 2
        assert {example.what for example in coverage.examples} == {"task"}


def test_only_tasks_with_a_memory_of_their_own_are_of_users(
    prog: Program, overlay: Overlay
) -> None:
    """A worker uses that of a process after kthread_use_mm(); exit_mm() leaves none."""
    process, worker = user(prog), kernel_thread(prog)
    assert charge_of(prog, process).is_user and not charge_of(prog, worker).is_user
    overlay.write((change(process.flags, int(process.flags) | PF_VCPU),))
    assert charge_of(prog, process).is_user
    overlay.write((change(worker.mm, process.mm.value_()), change(process.mm, 0)))
    assert not charge_of(prog, process).is_user and not charge_of(prog, worker).is_user


def test_a_task_that_is_being_forked(prog: Program, overlay: Overlay) -> None:
    """The obj_cgroup that it has cached is that of its parent, without a reference."""
    task = user(prog)
    member = "objcg" if hasattr(task, "objcg") else None
    writes = [change(task.member_("__state"), TASK_NEW)]
    if member is not None:
        writes.append(change(task.member_(member), task.cgroups.value_()))
    overlay.write(tuple(writes))
    charge = charge_of(prog, task)
    assert (charge.objcgs, charge.stale, charge.is_runnable) == ((), True, False)
    # cgroup_post_fork() is over.
    overlay.write((change(task.member_("__state"), 0),))
    charge = charge_of(prog, task)
    objcgs = () if member is None else (task.cgroups.value_(),)
    assert (charge.objcgs, charge.stale, charge.is_runnable) == (objcgs, False, True)
    assert caches_objcg(Image(prog)) == (member is not None)


def test_a_task_that_is_being_moved(prog: Program, overlay: Overlay) -> None:
    """cgroup_migrate_execute() has put one of two tasks on a list of those that move."""
    moved = user(prog)
    other = next(
        t for t in for_each_task(prog) if t != moved and t.cgroups == kernel_thread(prog).cgroups
    )
    head, node = moved.cgroups.mg_tasks, moved.cg_list
    overlay.write(
        (
            change(other.cgroups, moved.cgroups.value_()),
            *(change(member, node.address_ or 0) for member in (head.next, head.prev)),
            *(change(member, head.address_ or 0) for member in (node.next, node.prev)),
        )
    )
    assert charge_of(prog, moved).is_migrating
    assert not charge_of(prog, other).is_migrating


def test_which_task_has_a_stack(prog: Program, overlay: Overlay) -> None:
    tasks = list(for_each_task(prog))
    for task in (tasks[0], tasks[-1]):
        stack = task.stack.value_()
        assert task_of_stack(Image(prog), stack, Coverage()) == task.value_()
        coverage = Coverage()
        assert task_of_stack(Image(prog), stack + 8, coverage) is None
        assert (coverage.read, coverage.unreadable) == (len(tasks), 0)


def test_what_is_read_of_each_thread(prog: Program, overlay: Overlay) -> None:
    task = user(prog)
    overlay.write((Write(task.comm.address_ or 0, b"a\xff\xfe\0rest\0"),))
    coverage, subsys = Coverage(), prog["memory_cgrp_id"]
    threads = {thread.address: thread for thread in read_threads(Image(prog), coverage)}
    tasks = list(for_each_task(prog))
    assert threads.keys() == addresses(tasks)
    assert (coverage.read, coverage.unreadable) == (len(tasks), 0)
    assert threads[task.value_()].comm == "a\\xff\\xfe"
    for one in tasks:
        thread = threads[one.value_()]
        css = cast("unsigned long", one.cgroups.subsys[subsys]).value_()
        assert (thread.pid, thread.tgid, thread.mm, thread.memcg) == (
            *(one.pid, one.tgid, one.mm.value_(), css),
        )
        assert thread.comm == one.comm.string_().decode(errors="backslashreplace")
        assert thread.of_kernel == bool(one.flags & PF_KTHREAD)
        counts = one.rss_stat.count if hasattr(one, "rss_stat") else ()
        assert thread.rss == tuple(map(int, counts))


def test_threads_whose_memcg_cannot_be_read(prog: Program, overlay: Overlay) -> None:
    """They share a css_set, which counts once."""
    shared = kernel_thread(prog).cgroups
    overlay.write((change(prog["init_pid_ns"].child_reaper.cgroups, POISON),))
    others = [t for t in for_each_task(prog) if t.cgroups == shared]
    for task in others[:2]:
        overlay.write((change(task.cgroups, POISON),))
    coverage = Coverage()
    threads = read_threads(Image(prog), coverage)
    lost = {thread.address for thread in threads if thread.memcg is None}
    assert lost == addresses([prog["init_pid_ns"].child_reaper, *others[:2]])
    assert (coverage.read, coverage.unreadable) == (len(threads), 1)
    assert coverage.examples[0].what == "memcg of a task"


def test_whether_a_task_has_a_memory(prog: Program) -> None:
    task, image = user(prog), Image(prog)
    address, mm = task.value_(), task.mm.value_()
    assert has_mm(image, address, mm)
    assert not has_mm(image, address, mm + 8)
    assert not has_mm(image, kernel_thread(prog).value_(), mm)
    # The memory of a task that has exited may be gone.
    assert not has_mm(image, POISON, 0)


def test_pages_that_tasks_take_fragments_from(
    prog: Program, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = for_each_task(prog)
    pages = {t.task_frag.page.value_() for t in for_each_task(prog)} - {0}
    coverage = Coverage()
    assert set(task_fragments(Image(prog), coverage)) == pages
    overlay.write((change(second.task_frag.page, 0x12340),))
    gone = Object(prog, "struct task_struct *", POISON)

    def damaged(_: Image, on_fault: OnFault) -> list[Object]:
        on_fault(FaultError("left out", 0x1000))
        return [gone, second]

    monkeypatch.setattr(sched_frag, "find_tasks", damaged)
    assert list(task_fragments(Image(prog), coverage)) == [0x12340]
    assert {missed.what for missed in coverage.examples} == {"page fragment of a task"}
    assert [missed.address for missed in coverage.examples] == [
        0x1000,
        gone.task_frag.page.address_,
    ]


def test_counts_of_pages_that_a_task_keeps(prog: Program, overlay: Overlay) -> None:
    """They are changes, up to 6.1, and can be below 0."""
    task = next(t for t in for_each_task(prog) if t.mm)
    if not task.type_.type.has_member("rss_stat"):
        assert {thread.rss for thread in read_threads(Image(prog), Coverage())} == {()}
        return
    counts = [-5, 7, 0, -1][: len(task.rss_stat.count)]
    for count, value in zip(task.rss_stat.count, counts, strict=True):
        overlay.write((change(count, value),))
    threads = {thread.address: thread for thread in read_threads(Image(prog), Coverage())}
    assert threads[task.value_()].rss == tuple(counts)
