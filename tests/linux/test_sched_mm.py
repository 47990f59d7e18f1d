# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Which function set ``active_memcg``, by words that are planted into the stacks of an image.

A function that sets the pointer is on a stack if its return address is, and below it that of the
function that it was calling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import pytest
from drgn import FaultError, Object, Program, sizeof
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.sched import cpu_curr
from support.guests import ARCH, DEBIAN_KERNELS, Lab
from support.old_calls import clear_calls
from support.planting import Overlay, Write, change

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel import sched_mm
from memcg_inspect.linux.kernel.sched import read_task
from memcg_inspect.linux.kernel.sched_mm import read_active_memcgs, sets_active_memcg
from memcg_inspect.linux.kernel.stacktrace_words import stack_of
from memcg_inspect.model import Coverage
from memcg_inspect.model_tasks import ActiveMemcg

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    # Calls are told from instructions of x86-64.
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS if ARCH == "amd64" else ()),
]

#: A function that sets the pointer, in all kernels.
SETTER = "mem_cgroup_css_alloc"
#: Of include/linux/preempt.h: a softirq is served.
SOFTIRQ = 0x100
#: ``LIST_POISON1`` of include/linux/poison.h: no address.
POISON = 0xDEAD000000000100
#: The CPU whose interrupts charge a memcg, in these tests.
CPU = 1


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


def words_at(address: int, *values: int) -> Write:
    return Write(address, b"".join(value.to_bytes(8, "little") for value in values))


def memcg_of(prog: Program, task: Object) -> int:
    return int(task.cgroups.subsys[prog["memory_cgrp_id"]].value_())


def call(prog: Program) -> tuple[int, int]:
    """Return an address in a function that SETTER calls, and the return address of that call."""
    image, symbol = Image(prog), prog.symbol(SETTER)
    text = prog.read(symbol.address, symbol.size)
    for at in range(len(text) - 5):
        back = symbol.address + at + 5
        callee = (back + int.from_bytes(text[at + 1 : at + 5], "little", signed=True)) % (1 << 64)
        if text[at] != 0xE8:  # call
            continue
        try:
            found = prog.symbol(callee)
        except LookupError:
            continue
        if found.address == callee and found.size > 16 and not sets_active_memcg(image, callee):
            return callee + 8, back
    raise AssertionError(f"{SETTER}() calls nothing")


def top(prog: Program, task: Object) -> int:
    """Return where the saved registers of user space begin, which are any."""
    return sum(stack_of(Image(prog), task)) - sizeof(prog.type("struct pt_regs"))


def charges(overlay: Overlay, task: Object, *words: int) -> None:
    """Let a task charge the memcg that it is in, and have some words on its stack."""
    prog = overlay.prog
    active = change(task.active_memcg, memcg_of(prog, task))
    overlay.write((active, words_at(top(prog, task), *words)))


def found(prog: Program, *tasks: Object) -> list[ActiveMemcg]:
    image, coverage = Image(prog), Coverage()
    of = [read_task(image, task.value_()) for task in tasks]
    active = read_active_memcgs(image, of, coverage)
    assert coverage.unreadable == 0
    return active


def test_a_function_that_calls_another(prog: Program, overlay: Overlay, task: Object) -> None:
    callee, back = call(prog)
    assert found(prog, task) == []
    charges(overlay, task, callee, back)
    memcg = memcg_of(prog, task)
    name = f"{task.comm.string_().decode()} ({task.pid.value_()})"
    [active] = found(prog, task)
    assert active == ActiveMemcg(memcg, name, task.value_(), memcg, SETTER, None)


def test_a_word_that_an_earlier_call_left(prog: Program, overlay: Overlay, task: Object) -> None:
    """The function that it calls has no address further down the stack."""
    callee, back = call(prog)
    for words in ((back,), (back, callee), (callee - 8, back)):
        charges(overlay, task, *words)
        [active] = found(prog, task)
        assert active.function is None
        assert active.why_unknown == (
            f"{SETTER}() may be on the stack, or may be left over from a call"
        )
        overlay.clear()


def test_a_function_whose_code_is_missing(
    lab: Lab, kernel: str, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one that sets the pointer."""
    prog = lab.image(kernel, "4", "mixed").own_program()
    task = Object(prog, "struct task_struct *", task.value_())
    charges(Overlay(prog), task, *call(prog))
    symbol = prog.symbol(SETTER)

    def missing(address: int, *_: object) -> NoReturn:
        raise FaultError("not in the image", address)

    prog.add_memory_segment(symbol.address, symbol.size, missing, False)
    monkeypatch.setattr(sched_mm._Code, "is_known", lambda _: True)
    [active] = found(prog, task)
    why = f"the code of {SETTER}(), which may set it, is not in the image"
    assert (active.function, active.why_unknown) == (None, why)
    assert sets_active_memcg(Image(prog), symbol.address) is None


def test_a_stack_without_such_a_function(prog: Program, overlay: Overlay, task: Object) -> None:
    callee, back = call(prog)
    unused = stack_of(Image(prog), task)[0] + 0x100
    start = prog.symbol(SETTER).address
    # The address of a function is no return address.
    charges(overlay, task, callee, start)
    overlay.write((words_at(unused, callee, back),))
    [active] = found(prog, task)
    assert (active.function, active.why_unknown) == (None, None)
    # Where the saved stack pointer is damaged, all of the stack counts.
    for sp in (0, unused - 0x101, sum(stack_of(Image(prog), task))):
        overlay.write((change(task.thread.sp, sp),))
        [active] = found(prog, task)
        assert active.function == SETTER


def test_a_stack_that_is_missing(prog: Program, overlay: Overlay, task: Object) -> None:
    charges(overlay, task)
    overlay.write((change(task.stack, POISON),))
    image, coverage = Image(prog), Coverage()
    charge = read_task(image, task.value_())
    assert read_active_memcgs(image, [charge], coverage) == []
    assert coverage.unreadable == 1
    assert coverage.examples[0].what == "stack of a task"


def test_a_kernel_whose_stacks_are_not_known(
    prog: Program, overlay: Overlay, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is named by the task."""

    def unknown(*_: object) -> NoReturn:
        raise UnknownKernelError("no THREAD_SIZE")

    charges(overlay, task)
    monkeypatch.setattr(sched_mm, "_state", unknown)
    image, coverage = Image(prog), Coverage()
    charge = read_task(image, task.value_())
    assert read_active_memcgs(image, [charge], coverage) == []
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("stack of a task", task.value_())
    assert missed.reason.endswith("no THREAD_SIZE")


def test_a_kernel_whose_instructions_are_not_known(
    prog: Program, overlay: Overlay, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    charges(overlay, task, *call(prog))
    monkeypatch.setattr(sched_mm, "instructions", lambda _: None)
    [active] = found(prog, task)
    assert (active.memcg, active.function) == (memcg_of(prog, task), None)
    assert active.why_unknown == "functions that set active_memcg are not known on this kernel"


# Interrupts


def interrupts(overlay: Overlay, *, count: int = SOFTIRQ) -> Object:
    """Let the interrupts of a CPU charge a memcg; return the task that the CPU was running."""
    prog = overlay.prog
    task, memcg = cpu_curr(prog, CPU), prog["root_mem_cgroup"].value_()
    counter = "pcpu_hot" if any(True for _ in prog.symbols("pcpu_hot")) else "__preempt_count"
    variable = per_cpu(prog[counter], CPU)
    preempt = variable.preempt_count if counter == "pcpu_hot" else variable
    overlay.write((change(preempt, count), change(per_cpu(prog["int_active_memcg"], CPU), memcg)))
    return task


def of_cpus(active: list[ActiveMemcg]) -> list[tuple[str | None, str | None]]:
    """Return what is told of the interrupts of CPUs."""
    found = [one for one in active if one.task is None]
    assert all((one.name, one.owner) == (f"CPU {CPU}", None) for one in found)
    return [(one.function, one.why_unknown) for one in found]


def on_stack(overlay: Overlay, task: Object, *words: int) -> None:
    """Put words to where the stack of a CPU's task begins."""
    end = sum(stack_of(Image(overlay.prog), task))
    overlay.write((words_at(end - 8 * len(words), *words),))


def test_the_interrupts_of_a_cpu(prog: Program, overlay: Overlay) -> None:
    """A CPU that handles none has left the pointer set."""
    assert found(prog) == []
    task = interrupts(overlay)
    assert of_cpus(found(prog)) == [(None, None)]
    on_stack(overlay, task, *call(prog))
    [active] = found(prog)
    assert active.memcg == prog["root_mem_cgroup"].value_()
    assert of_cpus([active]) == [(SETTER, None)]
    interrupts(overlay, count=0)
    assert of_cpus(found(prog)) == [(None, None)]


def test_one_function_for_a_task_and_an_interrupt(prog: Program, overlay: Overlay) -> None:
    """Either may be what it sets. Two functions set both."""
    task, pair = interrupts(overlay), call(prog)
    overlay.write((change(task.active_memcg, prog["root_mem_cgroup"].value_()),))
    for times, told in (
        (0, (None, None)),
        (1, (None, f"{SETTER}() set active_memcg either of the task or of an interrupt")),
        (2, (SETTER, None)),
    ):
        on_stack(overlay, task, *(pair * times))
        active = found(prog, task)
        assert of_cpus(active) == [told]
        [own] = [(one.function, one.why_unknown) for one in active if one.task]
        assert own == told
    # An interrupt that charges nothing leaves the function to the task.
    on_stack(overlay, task, 0, 0, *pair)
    overlay.write((change(per_cpu(prog["int_active_memcg"], CPU), 0),))
    active = found(prog, task)
    assert of_cpus(active) == []
    assert [one.function for one in active] == [SETTER]


def test_a_task_that_a_cpu_was_running(prog: Program, overlay: Overlay) -> None:
    """Its registers tell where it was; without them, nothing is known."""
    task = cpu_curr(prog, CPU)
    overlay.write((change(task.active_memcg, memcg_of(prog, task)),))
    assert [one.function for one in found(prog, task)] == [None]
    on_stack(overlay, task, *call(prog))
    assert [one.function for one in found(prog, task)] == [SETTER]


def test_a_cpu_that_has_used_all_of_its_stack(
    prog: Program, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the stack of the task until the stack pointer is below where that begins."""
    task = interrupts(overlay)
    start = stack_of(Image(prog), task)[0]
    overlay.write((change(task.active_memcg, memcg_of(prog, task)),))
    on_stack(overlay, task, *call(prog))
    either = f"{SETTER}() set active_memcg either of the task or of an interrupt"
    for sp, told in ((start, (None, either)), (start - 8, (SETTER, None))):
        frame = Frame(prog.symbol("kfree").address, sp)
        monkeypatch.setattr(sched_mm, "unwind", lambda *_, frame=frame: [frame])
        [own] = [(one.function, one.why_unknown) for one in found(prog, task) if one.task]
        assert own == told


def test_a_cpu_in_user_mode(
    prog: Program, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function may have left the pointer set; none is on the stack."""
    task = cpu_curr(prog, CPU)
    overlay.write((change(task.active_memcg, memcg_of(prog, task)),))
    on_stack(overlay, task, *call(prog))
    frame = Frame(0x401000, sum(stack_of(Image(prog), task)) - 16)
    monkeypatch.setattr(sched_mm, "unwind", lambda *_: [frame])
    assert [(one.function, one.why_unknown) for one in found(prog, task)] == [(None, None)]


def test_a_cpu_at_the_start_of_a_function(
    prog: Program, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program counter can be there, and a return address cannot."""
    task, start = cpu_curr(prog, CPU), prog.symbol(SETTER).address
    overlay.write((change(task.active_memcg, memcg_of(prog, task)),))
    frame = Frame(start, sum(stack_of(Image(prog), task)) - 8)
    monkeypatch.setattr(sched_mm, "unwind", lambda *_: [frame])
    on_stack(overlay, task, start)
    assert [one.function for one in found(prog, task)] == [SETTER]
    frame = frame._replace(pc=start - 1)
    assert [one.function for one in found(prog, task)] == [None]


def test_registers_that_are_not_in_the_image(
    prog: Program, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwind(*_: object) -> None:
        raise LookupError("registers not found")

    monkeypatch.setattr(sched_mm, "unwind", unwind)
    task = interrupts(overlay)
    overlay.write((change(task.active_memcg, memcg_of(prog, task)),))
    active = found(prog, task)
    why = "the registers of its CPU are not in the image"
    assert [(one.function, one.why_unknown) for one in active] == [(None, why)] * 2


class Frame(NamedTuple):
    """What is used of ``drgn.StackFrame``."""

    pc: int
    sp: int


def test_a_cpu_on_the_stack_of_interrupts(
    prog: Program, overlay: Overlay, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on that stack is of the interrupt; what it came upon is of the task."""
    running, pair = interrupts(overlay), call(prog)
    overlay.write((change(running.active_memcg, memcg_of(prog, running)),))
    # The stack of another task stands for that of interrupts. Its pointer is no multiple of a word.
    # What that task has called is no matter here.
    clear_calls(overlay, *stack_of(Image(prog), task))
    other = stack_of(Image(prog), task)[0]
    frame = Frame(prog.symbol("kfree").address, other + 0x103)
    monkeypatch.setattr(sched_mm, "unwind", lambda *_: [frame])

    def told() -> list[str | None]:
        """Return the functions of the task and of the interrupt."""
        return [one.function for one in found(prog, running)]

    assert told() == [None, None]
    overlay.write((words_at(other + 0x100, *pair),))
    assert told() == [None, SETTER]
    on_stack(overlay, running, *pair)
    assert told() == [SETTER, SETTER]
    overlay.write((words_at(other + 0x100, 0, 0),))
    # Either may be what a function on the stack of the task sets.
    assert told() == [SETTER, None]
    # Code that no symbol is for, as that of BPF.
    frame = Frame(pair[0] | 0xFFFF << 16, other)
    with pytest.raises(LookupError):
        prog.symbol(frame.pc)
    assert told() == [SETTER, None]
    # In user mode, nothing of the kernel is on a stack.
    frame = Frame(0x401000, other)
    assert told()[1] is None
    # Without an interrupt, the stack of the task has the function, and so may the other one.
    overlay.write((change(per_cpu(prog["int_active_memcg"], CPU), 0),))
    interrupts(overlay, count=0)
    frame = Frame(prog.symbol("kfree").address, other + 0x103)
    assert told()[0] == SETTER


# A running kernel


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens while the program sleeps, in turn, in a running kernel."""
    happens: list[Callable[[], None]] = []

    def sleep(_: float) -> None:
        if happens:
            happens.pop(0)()

    monkeypatch.setattr(Image, "is_moving", True)
    monkeypatch.setattr(sched_mm.time, "sleep", sleep)
    return happens


def test_a_task_that_runs_meanwhile(
    prog: Program, overlay: Overlay, task: Object, asleep: list[Callable[[], None]]
) -> None:
    """Its stack is read again until it sleeps all the time."""
    charges(overlay, task, *call(prog))
    assert [one.function for one in found(prog, task)] == [SETTER]
    overlay.write((change(task.on_cpu, 1),))
    [active] = found(prog, task)
    assert (active.function, active.why_unknown) == (None, "it ran while its stack was read")
    asleep += [lambda: None, lambda: overlay.write((change(task.on_cpu, 0),))]
    assert [one.function for one in found(prog, task)] == [SETTER]
    assert asleep == []
    # The function has set the old value again.
    overlay.write((change(task.on_cpu, 1),))
    asleep.append(lambda: overlay.write((change(task.active_memcg, 0),)))
    assert found(prog, task) == []


def test_interrupts_of_a_running_kernel(
    prog: Program, overlay: Overlay, asleep: list[Callable[[], None]]
) -> None:
    """They charge a memcg for a moment only."""
    interrupts(overlay)
    assert of_cpus(found(prog)) == [(None, "it ran while its stack was read")]
    pointer = per_cpu(prog["int_active_memcg"], CPU)
    asleep += [lambda: None, lambda: overlay.write((change(pointer, 0),))]
    assert found(prog) == []


def test_how_often_a_running_kernel_is_read(
    prog: Program, overlay: Overlay, task: Object, asleep: list[Callable[[], None]]
) -> None:
    """Ten times, for a task and for a CPU."""
    counted = list[int]()
    charges(overlay, task, *call(prog))
    overlay.write((change(task.on_cpu, 1),))
    asleep += [lambda: counted.append(1)] * 20
    assert [one.why_unknown for one in found(prog, task)] == ["it ran while its stack was read"]
    assert len(counted) == 10
    interrupts(overlay)
    assert len(found(prog)) == 1
    assert len(counted) == 20


def test_a_task_that_ran_between_two_reads(
    prog: Program,
    overlay: Overlay,
    task: Object,
    asleep: list[Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel counts how often a task stopped of its own will, and how often it had to."""
    charges(overlay, task, *call(prog))
    counts, saved, slept = [task.nvcsw, task.nivcsw], sched_mm.saved_stack_pointer, list[int]()

    def runs(image: Image, task: Object) -> int | None:
        for count in counts:
            overlay.write((change(count, count.value_() + 1),))
        counts.clear()
        return saved(image, task)

    monkeypatch.setattr(sched_mm, "saved_stack_pointer", runs)
    asleep.append(lambda: slept.append(1))
    assert [one.function for one in found(prog, task)] == [SETTER]
    assert slept == [1]


def test_a_function_that_has_set_the_old_value_again(
    prog: Program, overlay: Overlay, task: Object
) -> None:
    charges(overlay, task, *call(prog))
    charge = read_task(Image(prog), task.value_())
    overlay.write((change(task.active_memcg, 0),))
    assert read_active_memcgs(Image(prog), [charge], Coverage()) == []


def test_a_pointer_of_a_cpu_that_is_missing(
    prog: Program, overlay: Overlay, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of tasks stays."""

    def missing(*_: object) -> NoReturn:
        raise FaultError("left out", POISON)

    charges(overlay, task, *call(prog))
    monkeypatch.setattr(sched_mm, "per_cpu_ptr", missing)
    image, coverage = Image(prog), Coverage()
    active = read_active_memcgs(image, [read_task(image, task.value_())], coverage)
    assert [one.function for one in active] == [SETTER]
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("int_active_memcg of a CPU", POISON)
    assert "left out" in missed.reason
