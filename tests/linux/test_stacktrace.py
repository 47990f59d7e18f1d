# SPDX-License-Identifier: LGPL-2.1-or-later
"""What CPUs were running, and which tasks were stopped in the kernel, by planted states."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from drgn import FaultError, Object, Program, SymbolKind
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.sched import cpu_curr, task_cpu
from support.guests import DEBIAN_KERNELS, Lab
from support.old_calls import clear_calls
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel import stacktrace
from memcg_inspect.linux.kernel.stacktrace import read_running, read_waiting
from memcg_inspect.linux.kernel.stacktrace_words import functions_in, stack_of, whole_stack
from memcg_inspect.model import Coverage, Held, Running

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

#: Of include/linux/sched.h.
RUNNING, INTERRUPTIBLE, UNINTERRUPTIBLE, NOLOAD = 0, 1, 2, 0x400
USER = 0x401000


@pytest.fixture
def prog(lab: Lab, kernel: str) -> Program:
    return lab.image(kernel, "4", "mixed").program()


@pytest.fixture
def overlay(prog: Program) -> Iterator[Overlay]:
    overlay = Overlay(prog)
    yield overlay
    overlay.clear()


@pytest.fixture
def task(prog: Program) -> Object:
    """A task that sleeps in a system call."""
    return next(t for t in for_each_task(prog) if t.mm and t.pid > 1 and t.member_("__state") == 1)


def stopped(overlay: Overlay, task: Object, state: int = RUNNING) -> None:
    """Let a task be in another state, and its name have bytes that are not UTF-8."""
    at = task.member_("__state").address_ or 0
    name = b"a\xffb\0".ljust(16, b"\0")
    overlay.write((Write(at, state.to_bytes(4, "little")), Write(task.comm.address_ or 0, name)))


def of_task(found: list[Running], task: Object) -> Running | None:
    return next((one for one in found if one.pid == int(task.pid)), None)


@pytest.mark.parametrize(
    ("state", "counts"),
    [
        (RUNNING, True),  # it was preempted
        (INTERRUPTIBLE, False),
        (UNINTERRUPTIBLE, True),
        (UNINTERRUPTIBLE | NOLOAD, False),  # as idle workers
        (UNINTERRUPTIBLE | 0x100, True),  # TASK_WAKEKILL
        (INTERRUPTIBLE | NOLOAD, False),
        (0x200, True),  # TASK_WAKING
        (0x1000, True),  # TASK_RTLOCK_WAIT
    ],
)
def test_which_tasks_may_have_left_a_charge_half_done(
    prog: Program, overlay: Overlay, task: Object, state: int, counts: bool
) -> None:
    stopped(overlay, task, state)
    one = of_task(read_running(Image(prog)), task)
    assert (one is not None) is counts
    assert of_task(read_waiting(Image(prog)), task) == one
    if one is None:
        return
    names = [f.name.partition(".")[0] for f in prog.stack_trace(task)]
    assert one.functions == tuple(name for name in names if not name.startswith("0x"))
    assert (one.cpu, one.comm, one.waiting, one.busy) == (task_cpu(task), "a\\xffb", True, True)
    assert one.held is not None


def test_a_task_on_a_cpu_does_not_wait(prog: Program, overlay: Overlay) -> None:
    """An idle CPU halts, outside of interrupts: it has finished what it was doing."""
    found = read_running(Image(prog))
    running = [one for one in found if not one.waiting]
    assert [one.cpu for one in running] == list(for_each_online_cpu(prog))
    for one in running:
        task = cpu_curr(prog, one.cpu)
        assert (one.pid, one.comm) == (task.pid, task.comm.string_().decode())
        assert one.functions
        assert (one.busy, one.held is None) == ((False, True) if one.pid == 0 else (True, False))
    assert {one.pid for one in running}.isdisjoint({one.pid for one in found if one.waiting})


def test_a_task_that_runs_is_found_once(prog: Program, overlay: Overlay, task: Object) -> None:
    """It is on the CPU, not among the tasks that wait."""
    stopped(overlay, task)
    at = per_cpu(prog["runqueues"], 2).curr.address_ or 0
    overlay.write((Write(at, task.value_().to_bytes(8, "little")),))
    found = [one for one in read_running(Image(prog)) if one.pid == int(task.pid)]
    assert [(one.cpu, one.waiting, one.busy) for one in found] == [(2, False, True)]


def test_a_cpu_whose_task_is_not_known(prog: Program, overlay: Overlay) -> None:
    """It may have been in the kernel, whether or not somebody counts such CPUs."""
    at = per_cpu(prog["runqueues"], 2).curr.address_ or 0
    overlay.write((Write(at, (0xDEAD000000000100).to_bytes(8, "little")),))
    coverage = Coverage()
    for found in (read_running(Image(prog)), read_running(Image(prog), coverage=coverage)):
        assert [one for one in found if one.cpu == 2 and not one.waiting] == [
            Running(2, -1, "?", (), True)
        ]
    assert coverage.unreadable == 1


def damaged(*_: object) -> None:
    raise ValueError("damaged tables")


def test_a_stack_that_cannot_be_unwound(
    prog: Program, overlay: Overlay, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is on it counts. A task of a running kernel may run by now, and does not."""
    stopped(overlay, task)
    names = functions_in(Image(prog), whole_stack(Image(prog), task))
    monkeypatch.setattr(stacktrace, "unwind", damaged)
    found = read_running(Image(prog))
    one = of_task(found, task)
    assert one is not None
    assert (one.functions, one.busy, one.waiting) == (names, True, True)
    assert one.held is not None
    for one in found:
        if not one.waiting:
            assert (one.busy, one.functions, one.held) == (True, (), None)
    assert of_task(read_waiting(Image(prog)), task) is not None
    monkeypatch.setattr(Image, "is_moving", True)
    assert read_waiting(Image(prog)) == []


@pytest.mark.parametrize(
    ("function", "counts"), [("pcpu_alloc_area", True), ("free_percpu", True), ("kfree", False)]
)
def test_sizes_count_where_percpu_memory_is_changed(
    *,
    prog: Program,
    overlay: Overlay,
    task: Object,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    counts: bool,
) -> None:
    """Nothing points to an allocation before the function that makes it returns."""
    stopped(overlay, task)
    # The task may have called these functions earlier.
    clear_calls(overlay, *stack_of(Image(prog), task), "percpu|pcpu")
    start = stack_of(Image(prog), task)[0] + 0x100
    size, address = 264, prog.symbol(function).address + 4
    overlay.write((Write(start, size.to_bytes(8, "little") + address.to_bytes(8, "little")),))
    monkeypatch.setattr(stacktrace, "unwind", damaged)
    one = of_task(read_running(Image(prog)), task)
    assert one is not None
    assert function in one.functions
    sizes = {held.address for held in one.held or () if held.kind == "percpu"}
    assert (size in sizes) is counts


class Frame(NamedTuple):
    """What is used of ``drgn.StackFrame``."""

    name: str | None
    pc: int
    sp: int

    def registers(self) -> dict[str, int]:
        return {}


class Trace(list[Frame]):
    """What is used of ``drgn.StackTrace``."""

    prog: Program


@pytest.fixture
def unwound(prog: Program, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Object, Trace]]:
    """The task that a CPU was running, and a stack trace that a test can fill."""
    trace = Trace()
    trace.prog = prog
    monkeypatch.setattr(stacktrace, "unwind", lambda *_: trace)
    return cpu_curr(prog, 1), trace


def on_cpu(prog: Program, cpu: int = 1) -> Running:
    return next(one for one in read_running(Image(prog)) if one.cpu == cpu and not one.waiting)


def test_code_that_has_no_name(prog: Program, unwound: tuple[Object, Trace]) -> None:
    """A module without debug info, or a BPF program, is in the kernel; user space is not."""
    task, trace = unwound
    sp, module = task.stack.value_() + 0x2000, 0xFFFFFFFFC1230000
    known = prog.symbol("vfs_write").address + 4
    trace[:] = [Frame(None, USER, sp), Frame(None, known, sp)]
    assert on_cpu(prog)[3:5] == ((), False)
    trace[:] = [Frame(f"{module:#x}", module, sp), Frame("0xffff", known, sp), Frame(None, 8, sp)]
    # What is outside of the kernel's text is no function.
    trace.append(Frame(None, prog.symbol("runqueues").address + 8, sp))
    one = on_cpu(prog)
    assert one.functions[:2] == (f"{module:#x}", "vfs_write")
    assert not any(name.startswith(("0x", "runqueues")) for name in one.functions[1:])
    assert (one.busy, one.held is not None) == (True, True)


def test_a_stack_that_was_unwound_to_its_end(
    prog: Program, overlay: Overlay, unwound: tuple[Object, Trace]
) -> None:
    """Otherwise all functions count that have an address on it."""
    task, trace = unwound
    start, size = stack_of(Image(prog), task)
    sp, pc = start + size - 0x40, prog.symbol("kfree").address + 4
    address = prog.symbol("vfs_write").address + 4
    overlay.write((Write(sp, address.to_bytes(8, "little") + bytes(56)),))
    first, last = Frame("kfree", pc, sp), Frame("entry_SYSCALL_64_after_hwframe", pc, sp)
    whole = ("kfree", "entry_SYSCALL_64_after_hwframe")
    middle = Frame("dput.part.0", pc, sp)
    fault, user = Frame("asm_exc_page_fault", pc, sp), Frame(None, USER, sp)
    for frames, names in (
        ([first, last], whole),
        ([first], ("kfree", "vfs_write")),
        ([first, *[middle] * 62, last], ("kfree", *["dput"] * 62, whole[1])),
        ([first, *[middle] * 63, last], ("kfree", "dput", "vfs_write")),
        # An exception came upon user space, or upon the kernel.
        ([first, middle, fault, user], ("kfree", "dput", "asm_exc_page_fault")),
        ([first, middle, fault], ("kfree", "dput", "asm_exc_page_fault", "vfs_write")),
        # The kernel saved its registers itself.
        ([Frame("__crash_kexec", pc, sp), last], ("__crash_kexec", whole[1], "vfs_write")),
        # The CPU is on the stack of another task.
        ([first._replace(sp=start - 64), last._replace(sp=start - 64)], None),
    ):
        trace[:] = frames
        one = on_cpu(prog)
        assert one.busy
        if names is not None:
            assert one.functions == names
        else:
            assert set(one.functions) > {*whole, "vfs_write"}


def test_an_idle_cpu_in_an_interrupt(prog: Program, unwound: tuple[Object, Trace]) -> None:
    task, trace = unwound
    assert task.pid == 0
    sp, pc = task.stack.value_() + 0x2000, prog.symbol("kfree").address + 4
    trace[:] = [Frame(name, pc, sp) for name in ("default_idle", "do_idle", "cpu_startup_entry")]
    assert on_cpu(prog)[3:6] == (("default_idle", "do_idle", "cpu_startup_entry"), False, None)
    trace.insert(0, Frame("kmem_cache_free", pc, sp))
    one = on_cpu(prog)
    assert one.busy
    assert one.held is not None


def test_what_is_looked_for(prog: Program, overlay: Overlay, task: Object) -> None:
    """Memcgs, obj_cgroups, and memcgs that were released, for which their parent pays."""
    stopped(overlay, task)
    css = task.cgroups.subsys[prog["memory_cgrp_id"]]
    memcg, parent = css.value_(), css.parent.value_()
    top = sum(stack_of(Image(prog), task)) - 168
    objcg = top + 4096
    overlay.write((Write(top, memcg.to_bytes(8, "little") + objcg.to_bytes(8, "little")),))

    def held(*wanted: list[int]) -> list[set[Held]]:
        read = [read_running(Image(prog), *wanted), read_waiting(Image(prog), *wanted)]
        return [{h for one in found for h in one.held or ()} for found in read]

    for found in held([memcg], [objcg]):
        assert {Held("memcg", memcg, memcg), Held("objcg", objcg, objcg)} <= found
    for found in held([], [], [memcg]):
        assert Held("memcg", memcg, parent) in found


def test_cpus_whose_runqueues_are_not_known(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise LookupError("no runqueues")

    monkeypatch.setattr(stacktrace, "cpu_curr", missing)
    coverage, cpus = Coverage(), list(for_each_online_cpu(prog))
    found = [one for one in read_running(Image(prog), coverage=coverage) if not one.waiting]
    assert found == [Running(cpu, -1, "?", (), True) for cpu in cpus]
    assert coverage.unreadable == len(cpus)
    missed = coverage.examples[0]
    assert (missed.what, missed.address) == ("task that a CPU was running", 0)
    assert missed.reason == f"CPU {cpus[0]}: no runqueues"


def test_which_symbols_are_functions(
    prog: Program, unwound: tuple[Object, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of modules, too, and in the kernel's text those without a kind."""
    task, trace = unwound
    symbol, module = Image.symbol, 0xFFFFFFFFC1230000
    made = {
        module: SimpleNamespace(name="of_module", kind=SymbolKind.FUNC),
        prog.symbol("kfree").address + 4: SimpleNamespace(
            name="in_assembly", kind=SymbolKind.UNKNOWN
        ),
        module + 8: SimpleNamespace(name="data_of_module", kind=SymbolKind.OBJECT),
        module + 16: SimpleNamespace(name="no_kind", kind=SymbolKind.UNKNOWN),
    }
    monkeypatch.setattr(
        Image, "symbol", lambda image, place: made.get(place) or symbol(image, place)
    )
    trace[:] = [Frame(None, place, task.stack.value_() + 0x2000) for place in made]
    functions = on_cpu(prog).functions
    assert functions[:2] == ("of_module", "in_assembly")
    assert {"data_of_module", "no_kind"}.isdisjoint(functions)


def test_a_stack_that_is_missing(
    prog: Program, overlay: Overlay, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the task was is not known: it may have left a charge half done. The others are read."""
    stopped(overlay, task)
    overlay.write((Write(task.stack.address_ or 0, (0xDEAD000000000100).to_bytes(8, "little")),))
    monkeypatch.setattr(stacktrace, "unwind", damaged)
    coverage = Coverage()
    found = read_running(Image(prog), coverage=coverage)
    one = of_task(found, task)
    assert one is not None
    assert (one.waiting, one.busy, one.functions, one.held) == (True, True, (), None)
    assert len([one for one in found if not one.waiting]) == 4
    (missed,) = coverage.examples
    assert (missed.what, missed.address) == ("stack of a task", task.value_())
    assert missed.reason == f"that of a\\xffb ({one.pid}) is not in the image"


@pytest.mark.parametrize(
    ("at_work", "unknown"), [(0, 0), (1, 1), (3, 3), (1000, 64), (None, 1), (FaultError("", 0), 1)]
)
def test_tasks_that_are_missing(
    prog: Program,
    overlay: Overlay,
    task: Object,
    monkeypatch: pytest.MonkeyPatch,
    at_work: int | FaultError | None,
    unknown: int,
) -> None:
    """As many as the runqueues say may be in the middle of a charge; all, where they do not."""
    stopped(overlay, task)
    named = stacktrace._named

    def missing(one: Object, cpu: int) -> Running:
        if one.value_() == task.value_():
            raise FaultError("left out", 0x1000)
        return named(one, cpu)

    def unread_at_work(image: Image, known: list[Object], unread: set[int]) -> int | None:
        assert (len(known) > 50, set(unread)) == (True, {task.value_()})
        assert task not in known
        if isinstance(at_work, FaultError):
            raise at_work
        return at_work

    monkeypatch.setattr(stacktrace, "_named", missing)
    monkeypatch.setattr(stacktrace, "unread_at_work", unread_at_work)
    coverage = Coverage()
    found = read_running(Image(prog), coverage=coverage)
    one = Running(-1, -1, "?", (), True, waiting=True)
    assert [one for one in found if one.waiting and one.pid < 0] == [one] * unknown
    assert coverage.unreadable == unknown
    assert {(one.what, one.address) for one in coverage.examples} == (
        {("task that was not running", 0x1000)} if unknown else set()
    )
    monkeypatch.setattr(Image, "is_moving", True)
    assert all(one.pid >= 0 for one in read_running(Image(prog)))


def test_a_stack_of_a_running_kernel_that_is_gone(
    prog: Program, overlay: Overlay, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task was found to wait, and may have begun to run: nothing is known of its pointers."""

    def missing(*_: object) -> None:
        raise FaultError("left out", 0x1000)

    stopped(overlay, task)
    monkeypatch.setattr(stacktrace, "stack_words", missing)
    monkeypatch.setattr(Image, "is_moving", True)
    one = of_task(read_running(Image(prog)), task)
    assert one is not None
    assert any(name.startswith("__schedule") for name in one.functions)
    assert (one.busy, one.held) == (True, None)
    assert of_task(read_waiting(Image(prog)), task) is None
