# SPDX-License-Identifier: LGPL-2.1-or-later
"""Stacks without debug info are those of the kernel, and of drgn with other tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from drgn import FaultError, Object, Program, UnsupportedOperation
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import find_task, for_each_task
from drgn.helpers.linux.printk import get_dmesg
from drgn.helpers.linux.sched import cpu_curr
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, KERNELS, ROOT, Lab
from support.live_guest import execute, kept
from support.planting import Overlay, change

from memcg_inspect import session
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.arch.entry import is_idle
from memcg_inspect.linux.kernel.sched import find_tasks, find_tasks_and_dead
from memcg_inspect.linux.kernel.stacktrace import read_running
from memcg_inspect.linux.kernel.stacktrace_words import (
    as_written,
    functions_in,
    is_on_own_stack,
    stack_of,
    whole_stack,
)
from memcg_inspect.linux.mm.mmzone import online_cpus
from memcg_inspect.model import Running

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


#: Where the kernel is entered, and where its own threads begin.
OUTERMOST = ("entry_", "asm_", "ret_from_fork", "common_startup", "secondary_startup")


def is_whole(task: Running) -> bool:
    """Return whether the stack of a task was unwound to its end."""
    return any(name.startswith(OUTERMOST) for name in task.functions[-1:])


@pytest.mark.parametrize("kernel", KERNELS)
def test_functions_of_stacks_are_no_old_names(lab: Lab, kernel: str) -> None:
    """Functions that have returned leave addresses on the stack."""
    image = lab.image(kernel, "4", "churn", freeze="busy", seed=1)
    known = {(t.cpu, t.pid): t for t in read_running(image_of(image.program(dwarf=True)))}
    found = {(t.cpu, t.pid): t for t in read_running(image_of(image.program()))}
    assert known.keys() == found.keys()
    # A CPU that changes from one task to another cannot be unwound.
    unwound = {key for key, task in known.items() if is_whole(task)}
    assert len(unwound) > 2
    right = 0
    for key in unwound:
        task = found[key]
        # Several names can be of one address; drgn and kallsyms choose different ones.
        more = [
            name
            for name in set(task.functions) - set(known[key].functions)
            if not name.startswith(
                # Labels in assembler code: __put_user_nocheck_4() is in __put_user_4().
                (*OUTERMOST, "__put_user_nocheck", "__x86_indirect_thunk")
            )
        ]
        right += not more
    assert right >= 0.8 * len(unwound), found
    assert any(len(found[key].functions) > 3 for key in unwound)


def kernels_own(folder: Path) -> dict[int, tuple[str, list[str]]]:
    """
    Return what the kernel says of a guest's tasks, by pid.

    :return: how often it was switched from the task, and the functions on the stack, innermost
        first
    """
    # Tasks that ended meanwhile have no stack any more.
    script = (
        "for task in /proc/[0-9]*; do\n"
        'switches=$(grep ctxt_switches "$task/status" 2>/dev/null)\n'
        'stack=$(cat "$task/stack" 2>/dev/null) || continue\n'
        'echo "${task#/proc/}" $switches\nprintf "%s\n\n" "$stack"\ndone\n'
    )
    tasks = {}
    for text in execute(folder, script).split("\n\n"):
        head, *frames = text.split("\n")
        pid, _, switches = head.partition(" ")
        found = [re.match(r"\[<0>\] ([\w.]+)\+0x", frame) for frame in frames]
        if pid:
            tasks[int(pid)] = switches, [name[1] for name in found if name]
    return tasks


def have_one_address(prog: Program, name: str, other: str) -> bool:
    """Return whether two names may be of one function: ``__do_sys_pause``, ``__x64_sys_pause``."""
    addresses = ({symbol.address for symbol in prog.symbols(each)} for each in (name, other))
    return name == other or not set.isdisjoint(*addresses)


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_session_unwinds_as_the_kernel_does(tmp_path: Path, kernel: str) -> None:
    """/proc/PID/stack leaves out the functions of the scheduler, which are innermost."""
    with kept(tmp_path, kernel, "--nodes", "2", "--freeze", "none") as qmp:
        before = kernels_own(tmp_path)
        prog = session.open(qemu=str(qmp), debuginfo="btf")
        found = {}
        for pid in before:
            task = find_task(prog, pid)
            try:
                frames = prog.stack_trace(task) if task else ()
            except UnsupportedOperation:
                continue  # it runs at the moment
            # The last frame is in user space.
            found[pid] = [f.name for f in frames if not f.name.startswith("0x")]
        after = kernels_own(tmp_path)
        same = partial(have_one_address, prog)
        still = {pid: before[pid][1] for pid in found if after.get(pid) == before[pid]}
        still = {pid: names for pid, names in still.items() if names}
        assert len(still) > 20
        for pid, names in still.items():
            have = found[pid]
            assert have[0] == "__schedule"
            assert len(have) > len(names), pid
            assert all(map(same, have[-len(names) :], names)), (pid, have, names)


# Without CONFIG_DEBUG_BUGVERBOSE, which the lab's own configuration lacks, panic() prints no stack.
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_the_stack_of_a_crash_is_that_of_the_log(lab: Lab, kernel: str) -> None:
    """The kernel prints the stack of the CPU that panics, before it saves the registers."""
    image = lab.image(kernel, "4", "files", freeze="panic", format="kdump", level=23)
    prog = image.program()
    log = get_dmesg(prog).decode()
    printed = log.rpartition("Kernel panic")[2].partition("Call Trace:")[2].partition("</TASK>")[0]
    logged = {as_written(name) for name in re.findall(r"\]  ([\w.]+)\+0x", printed)}
    assert len(logged) > 5
    running = read_running(image_of(prog))
    (crashed,) = [task for task in running if "__crash_kexec" in task.functions]
    assert logged - set(crashed.functions) <= {"dump_stack_lvl"}


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k == "7.3-lab"])
@pytest.mark.parametrize("dwarf", [False, True], ids=["btf", "dwarf"])
def test_a_cpu_in_a_module_is_not_in_user_mode(lab: Lab, kernel: str, dwarf: bool) -> None:
    """The debug info of the kernel does not have the functions of modules."""
    module = (str(ROOT / "fixtures" / "modules" / "spinner"), "")
    image = lab.image(kernel, "2", "idle", freeze="busy", seed=1, cpus=2, modules=(module,))
    program = image.program(dwarf=dwarf)
    (task,) = [t for t in read_running(image_of(program)) if t.comm == "spinner"]
    assert task.busy
    assert task.held is not None


def not_on_stack(prog: Program, pid: int) -> set[str]:
    """Return the function that the registers of a CPU show, if a task is on one."""
    try:
        frame = prog.stack_trace(pid)[0]
    except LookupError:  # it was preempted after release_task() had taken its PID
        return set()
    return {frame.symbol().name} if frame.interrupted else set()


def test_damaged_tables_are_no_error(lab: Lab) -> None:
    """Without tables, all addresses on the stack of a task that waits count."""
    image = lab.image(KERNELS[-1], "4", "churn", freeze="busy", seed=1)
    right = {task.pid: task for task in read_running(image_of(image.program()))}
    prog = image.own_program()
    header = prog.symbol("__start_orc_header").address
    prog.add_memory_segment(header, 16, lambda *_: b"\xa5" * 16, False)
    with pytest.raises(Exception, match="orc_header"):
        prog.stack_trace(1)
    found = {task.pid: task for task in read_running(image_of(prog))}
    waiting = {pid for pid, task in right.items() if task.waiting}
    assert waiting <= found.keys()
    for pid in waiting:
        hidden = not_on_stack(image.program(), pid)
        assert set(found[pid].functions) >= set(right[pid].functions) - hidden, pid
        assert found[pid].held is not None
    in_user_mode = {pid for pid, task in right.items() if not task.functions}
    assert {pid for pid, task in found.items() if not task.busy} <= in_user_mode


def switched_out(prog: Program, overlay: Overlay) -> Iterator[tuple[Object, Running]]:
    """
    Find tasks whose on_cpu is set, though the CPU is on the stack of the next task.

    Each of them is made one that is at work: it may have gone to sleep.
    """
    current = {cpu_curr(prog, cpu).value_() for cpu in online_cpus(image_of(prog))}
    for task in list(for_each_task(prog)):
        if task.on_cpu and task.value_() not in current:
            overlay.write((change(task.member_("__state"), 0),))
            image = Image(prog)
            found = next(one for one in read_running(image) if one.pid == int(task.pid))
            if not is_on_own_stack(image, task, prog.stack_trace(task)):
                assert found.waiting
                yield task, found


def test_a_task_that_was_switched_out_has_its_own_functions(lab: Lab) -> None:
    """The CPU's registers are of the next task as soon as __switch_to_asm() has changed stacks."""
    for seed in range(1, 9):
        guest = lab.image(KERNELS[-1], "4", "churn", freeze="in:__switch_to", seed=seed)
        prog = guest.own_program()
        found = list(switched_out(prog, Overlay(prog)))
        for task, running in found:
            image = image_of(prog)
            assert set(running.functions) == set(functions_in(image, whole_stack(image, task)))
            assert "__schedule" in running.functions
            assert running.held is not None
        if found:  # the previous task may be the idle one
            return
    pytest.fail("no CPU was found that had left a task")


def dead_of(image: Image) -> list[Object]:
    """Return the tasks that have no PID any more, and are on the queue of a CPU."""
    faults: list[FaultError] = []
    listed = {task.value_() for task in find_tasks(image, faults.append)}
    found = {task.value_(): task for task in find_tasks_and_dead(image, faults.append)}
    assert faults == []
    assert found.keys() >= listed
    return [task for address, task in found.items() if address not in listed]


@pytest.mark.long
@pytest.mark.newest_kernel
def test_a_dead_thread_is_found_on_its_cpu(lab: Lab) -> None:
    """The stack of a thread is uncharged after release_task() has taken its PID."""
    where = "in:release_task/exit_task_stack_account"
    # Instead of a thread, the leader of a process may be stopped, which has its PID.
    for seed in range(1, 9):
        image = image_of(lab.image("7.3", "4", "churn", freeze=where, seed=seed).program())
        dead = dead_of(image)
        if dead:
            break
    assert not any(task.thread_pid for task in dead)
    queues = [per_cpu(image.prog["runqueues"], cpu) for cpu in online_cpus(image)]
    assert any(task == queue.curr for task in dead for queue in queues)


def is_between(image: Image, running: Running) -> bool:
    """Return whether a CPU is in ``switch_mm_irqs_off()``, on the stack of another task."""
    if running.waiting:
        return False
    task = cpu_curr(image.prog, running.cpu)
    start, size = stack_of(image, task)
    frames = list(image.prog.stack_trace(task))
    names = [as_written(frame.name) for frame in frames[:3] if frame.name]
    return "switch_mm_irqs_off" in names and not start <= frames[0].sp < start + size


@pytest.mark.newest_kernel
def test_a_cpu_between_two_tasks(lab: Lab) -> None:
    """Its task is the next one already, and it is on the stack of the previous one."""
    where = "in:__schedule/switch_mm_irqs_off"
    # A guest may stop a few instructions later, when stacks have been switched.
    for seed in range(1, 9):
        image = image_of(lab.image("7.3", "4", "churn", freeze=where, seed=seed).program())
        between = [running for running in read_running(image) if is_between(image, running)]
        if between:
            break
    assert between
    for running in between:
        task = cpu_curr(image.prog, running.cpu)
        assert running.held is not None
        assert set(functions_in(image, whole_stack(image, task))) <= set(running.functions)


@pytest.mark.parametrize(
    ("functions", "waits"),
    [
        (("default_idle", "do_idle"), True),
        (("cpu_do_idle", "arch_cpu_idle"), True),
        (("plpar_hcall_norets_notrace", "shared_cede_loop", "cpuidle_enter_state"), True),
        (("plpar_hcall_norets_notrace", "pseries_lpar_idle"), True),
        # It waits for a lock that the hypervisor's other processors hold.
        (("plpar_hcall_norets_notrace", "queued_spin_lock_slowpath", "do_idle"), False),
        (("plpar_hcall_norets_notrace",), False),
        (("tick_nohz_restart_sched_tick", "do_idle"), False),
        ((), False),
    ],
)
def test_where_an_idle_cpu_waits(functions: tuple[str, ...], waits: bool) -> None:
    assert is_idle(functions) is waits
