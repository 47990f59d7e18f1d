# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which tasks may hold a reference, by what is planted into the stacks of an image."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drgn import Object, Program, sizeof
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.pid import for_each_task
from drgn.helpers.linux.sched import cpu_curr
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Overlay, Write

from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel import stacktrace_refs
from memcg_inspect.linux.kernel.stacktrace_refs import Freeing, stack_refs
from memcg_inspect.linux.kernel.stacktrace_words import stack_of
from memcg_inspect.model import Coverage, StackRef

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

#: Words that no stack has by itself: one that is looked for, and another.
WANTED, OTHER = 0xFFFF123456789AB8, 0xFFFF123456789AC0
#: ``LIST_POISON1`` of include/linux/poison.h: no address.
POISON = 0xDEAD000000000100


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


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def user_registers(prog: Program, task: Object) -> int:
    """Return where the entry of a system call saved registers of user space, which are any."""
    start, size = stack_of(Image(prog), task)
    return start + size - sizeof(prog.type("struct pt_regs"))


def left_over(prog: Program, task: Object) -> int:
    """Return a place on a stack that is not in use any more."""
    place = stack_of(Image(prog), task)[0] + 0x100
    assert place < prog.stack_trace(task)[0].sp
    return place


def refs(prog: Program, *freeing: Freeing) -> tuple[StackRef, ...]:
    found = stack_refs(Image(prog), {WANTED}, Coverage(), freeing)
    assert found.keys() <= {WANTED}
    return found.get(WANTED, ())


def names(prog: Program, task: Object) -> set[str]:
    trace = prog.stack_trace(task)
    return {frame.name.partition(".")[0] for frame in trace if not frame.name.startswith("0x")}


def test_a_word_on_the_stack_of_a_task_that_sleeps(
    prog: Program, overlay: Overlay, task: Object
) -> None:
    assert refs(prog) == ()
    place = user_registers(prog, task)
    overlay.write((Write(left_over(prog, task), word(WANTED)),))
    assert refs(prog) == ()
    overlay.write((Write(place, 2 * word(WANTED) + word(OTHER)),))
    [ref] = refs(prog)
    assert (ref.pid, ref.comm) == (task.pid, task.comm.string_().decode())
    assert (ref.cpu, ref.words) == (None, 2)
    assert names(prog, task) <= set(ref.functions)


def test_which_stacks_are_read(prog: Program, overlay: Overlay, task: Object) -> None:
    """Those of all tasks, and of those that are idle, which are in no list."""
    running = {cpu_curr(prog, cpu).value_() for cpu in for_each_online_cpu(prog)}
    tasks = running | {other.value_() for other in for_each_task(prog)}
    coverage = Coverage()
    stack_refs(Image(prog), {WANTED}, coverage)
    assert (coverage.read, coverage.unreadable) == (len(tasks), 0)
    # do_exit() frees the stack of a task before the task itself.
    overlay.write((Write(task.stack.address_ or 0, word(0)),))
    coverage = Coverage()
    stack_refs(Image(prog), {WANTED}, coverage)
    assert (coverage.read, coverage.unreadable) == (len(tasks), 0)
    overlay.write((Write(task.stack.address_ or 0, word(POISON)),))
    coverage = Coverage()
    stack_refs(Image(prog), {WANTED}, coverage)
    assert (coverage.read, coverage.unreadable) == (len(tasks) - 1, 1)
    assert coverage.examples[0].what == "kernel stack"


def unknown(*_: object) -> None:
    raise LookupError("registers not found")


def test_registers_that_are_not_known_may_contain_anything(
    prog: Program, overlay: Overlay, task: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the stack counts then. A running kernel is read several times instead."""
    on_cpu = cpu_curr(prog, 1)
    for place in (left_over(prog, task), user_registers(prog, task), on_cpu.stack.value_() + 0x100):
        overlay.write((Write(place, word(WANTED)),))
    monkeypatch.setattr(stacktrace_refs, "unwind", unknown)
    found = refs(prog)
    assert all(ref.functions == () for ref in found)
    words = {ref.cpu: ref.words for ref in found}
    assert words == {None: 2, 0: 1, 1: 2, 2: 1, 3: 1}
    [sleeping] = [ref for ref in found if ref.cpu is None]
    assert sleeping.pid == task.pid
    monkeypatch.setattr(Image, "is_moving", True)
    assert {ref.cpu: ref.words for ref in refs(prog)} == {None: 2, 1: 1}


def test_a_task_in_user_mode_holds_nothing(
    prog: Program, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its stack was left by the system call before."""
    task = cpu_curr(prog, 1)
    start, size = stack_of(Image(prog), task)
    overlay.write((Write(start + size - 64, word(WANTED)),))
    [ref] = refs(prog)
    assert (ref.pid, ref.cpu, ref.words) == (task.pid, 1, 1)

    class User:
        pc = 0x401000

    monkeypatch.setattr(stacktrace_refs, "unwind", lambda *_: [User()])
    assert refs(prog) == ()


def test_an_object_that_a_task_frees(prog: Program, overlay: Overlay, task: Object) -> None:
    """It holds a reference until it is freed, however often the stack has its address."""
    overlay.write((Write(user_registers(prog, task), 2 * word(OTHER)),))
    pc = prog.stack_trace(task)[1].pc
    to = {OTHER: WANTED}
    [ref] = refs(prog, Freeing(frozenset({pc}), to.get))
    assert (ref.pid, ref.cpu, ref.words) == (task.pid, None, 1)
    assert names(prog, task) <= set(ref.functions)
    # Each of two kinds of objects may refer to it, and the stack itself may have it, too.
    overlay.write((Write(user_registers(prog, task) + 16, word(WANTED)),))
    both = Freeing(frozenset({pc}), to.get), Freeing(frozenset({pc, 1}), to.get)
    assert [ref.words for ref in refs(prog, *both)] == [3]
    # Nothing on the stack is in the functions that free such an object.
    assert [ref.words for ref in refs(prog, Freeing(frozenset({8}), to.get))] == [1]
    # It refers to something else.
    assert [ref.words for ref in refs(prog, Freeing(frozenset({pc}), {OTHER: 5}.get))] == [1]


def test_an_area_tells_how_large_a_stack_is(prog: Program, overlay: Overlay, task: Object) -> None:
    """``vm_struct->nr_pages``, with CONFIG_VMAP_STACK."""
    start, pages = task.stack.value_(), task.stack_vm_area.nr_pages
    for count in (2, 8):
        overlay.write((Write(pages.address_ or 0, count.to_bytes(4, "little")),))
        assert stack_of(Image(prog), task) == (start, count << 12)


def test_runqueues_that_are_not_known(prog: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise LookupError("no runqueues")

    monkeypatch.setattr(stacktrace_refs, "cpu_curr", missing)
    coverage, cpus = Coverage(), list(for_each_online_cpu(prog))
    assert stack_refs(Image(prog), {WANTED}, coverage) == {}
    assert coverage.unreadable == len(cpus)
    missed = coverage.examples[0]
    assert (missed.what, missed.address) == ("kernel stack", 0)
    assert missed.reason.startswith("no runqueues")
