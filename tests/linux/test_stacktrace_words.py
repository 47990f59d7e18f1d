# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which words are on the stacks that a task and its CPU use. The memory is made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from drgn import Object, StackTrace
from support.made_memory import BASE, SIZE, MadeMemory

from memcg_inspect.linux.kernel.stacktrace_words import (
    as_written,
    functions_in,
    is_on_own_stack,
    other_stack,
    places_in,
    stack_of,
    stack_words,
    unwind,
    whole_stack,
)

PAGE = 4096
#: Without ``union thread_union``, a stack counts as four pages.
UNKNOWN = 4 * PAGE
TASK, STACK, INTERRUPT = BASE, BASE + 0x10000, BASE + 0x20000
KERNEL, USER = 0xFFFFFFFF81000000, 0x401000
#: What the registers contain.
REGISTER = 0x1234


class Frame(NamedTuple):
    """What is used of ``drgn.StackFrame``; the stack pointer may not be known."""

    pc: int
    stack_pointer: int | None

    @property
    def sp(self) -> int:
        if self.stack_pointer is None:
            raise LookupError("stack pointer is not known")
        return self.stack_pointer

    def registers(self) -> dict[str, int]:
        return {"rax": REGISTER}


def trace_of(*frames: Frame) -> StackTrace:
    return frames  # type: ignore[return-value]


@pytest.fixture
def made() -> MadeMemory:
    """Memory in which each word is its own address, so that it tells where it was read."""
    made = MadeMemory()
    for address in range(STACK, INTERRUPT + 16 * UNKNOWN, 8):
        made.write(address, address)
    return made


@pytest.fixture
def task(made: MadeMemory) -> Object:
    found = made.at(made.struct("task_struct", [("stack", made.word)]), TASK)
    made.write(TASK, STACK)
    return found


def words(start: int, end: int) -> list[int]:
    return list(range(start, end, 8))


def read(made: MadeMemory, task: Object, *frames: Frame) -> list[int]:
    """Return the words of stacks, without that of the registers."""
    register, *found = stack_words(made.image, task, trace_of(*frames))
    assert register == REGISTER
    return found


def test_the_used_part_of_a_stack(made: MadeMemory, task: Object) -> None:
    """A stack grows downwards: what is below the stack pointer was left by earlier calls."""
    end = STACK + UNKNOWN
    for sp in (STACK, STACK + 8, end - 8):
        assert read(made, task, Frame(KERNEL, sp)) == words(sp, end)
    # The stack pointer of x86-64 need not be a multiple of a word.
    assert read(made, task, Frame(KERNEL, end - 13)) == words(end - 16, end)
    assert whole_stack(made.image, task) == words(STACK, end)


def test_an_interrupt_has_a_stack_of_its_own(made: MadeMemory, task: Object) -> None:
    """Where it came upon the task is not known, so all of that stack counts."""
    whole = words(STACK, STACK + UNKNOWN)
    start, frames = INTERRUPT + 0x100, (KERNEL, STACK + 0x800)
    other = words(start, INTERRUPT + UNKNOWN)
    assert read(made, task, Frame(KERNEL, start)) == whole + other
    # Frames on a stack that was read already add nothing.
    more = Frame(KERNEL, start + 0x800), Frame(*frames), Frame(KERNEL, None)
    assert read(made, task, Frame(KERNEL, start), *more) == whole + other
    # So does the end of the stack of the task: it is that of another one.
    after = STACK + UNKNOWN
    assert read(made, task, Frame(KERNEL, after)) == whole + words(after, after + UNKNOWN)


def test_several_stacks_of_interrupts(made: MadeMemory, task: Object) -> None:
    """An NMI on a softirq on a task, and no more stacks than a CPU has."""
    places = [INTERRUPT + n * UNKNOWN for n in range(10)]
    found = read(made, task, *(Frame(KERNEL, place) for place in places))
    assert found == words(STACK, STACK + UNKNOWN) + words(places[0], places[8])


def test_user_space_has_no_stack_of_the_kernel(made: MadeMemory, task: Object) -> None:
    frames = Frame(KERNEL, STACK + UNKNOWN - 8), Frame(USER, INTERRUPT), Frame(KERNEL, INTERRUPT)
    assert read(made, task, *frames) == [STACK + UNKNOWN - 8]
    # A stack that the image does not have is left out.
    missing = frames[0], Frame(KERNEL, BASE - 8)
    assert read(made, task, *missing) == [STACK + UNKNOWN - 8]
    found = read(made, task, *missing, Frame(KERNEL, BASE))
    assert found == [STACK + UNKNOWN - 8, *made.image.memory.words(made.prog.read(BASE, UNKNOWN))]


def test_a_stack_pointer_that_is_not_known(made: MadeMemory, task: Object) -> None:
    """That of an outer frame may be missing."""
    with pytest.raises(ValueError, match="not known"):
        stack_words(made.image, task, trace_of(Frame(KERNEL, None), Frame(KERNEL, STACK)))
    with pytest.raises(ValueError, match="not known"):
        is_on_own_stack(made.image, task, trace_of(Frame(USER, None)))


@pytest.mark.parametrize(
    ("pointers", "is_own"),
    [
        ((STACK,), True),
        ((STACK + UNKNOWN - 8,), True),
        ((INTERRUPT, STACK + 0x800), True),
        ((STACK - 8,), False),
        ((STACK + UNKNOWN,), False),
        ((INTERRUPT, None), False),
    ],
)
def test_whose_stack_it_is(
    made: MadeMemory, task: Object, pointers: Sequence[int | None], is_own: bool
) -> None:
    trace = trace_of(*(Frame(KERNEL, sp) for sp in pointers))
    assert is_on_own_stack(made.image, task, trace) is is_own


def test_words_up_to_four_pages_further(made: MadeMemory) -> None:
    start = INTERRUPT + 0x208
    assert list(other_stack(made.image, start)) == words(start, INTERRUPT + UNKNOWN)
    last = BASE + SIZE - PAGE
    assert len(list(other_stack(made.image, last + 8))) == PAGE // 8 - 1
    assert list(other_stack(made.image, BASE + SIZE)) == []


def test_a_task_that_has_exited_has_no_stack(made: MadeMemory, task: Object) -> None:
    made.write(TASK, 0)
    assert whole_stack(made.image, task) == []
    assert stack_of(made.image, task)[0] == 0


@pytest.mark.parametrize(
    ("kib", "size"), [(None, UNKNOWN), (8, 8 << 10), (256, 256 << 10), (512, 256 << 10)]
)
def test_how_large_a_stack_is(kib: int | None, size: int) -> None:
    """``THREAD_SIZE`` is that of ``union thread_union``, but no stack is larger than 256 KiB."""
    made = MadeMemory()
    task = made.at(made.struct("task_struct", [("stack", made.word)]), TASK)
    made.write(TASK, STACK)
    if kib is not None:
        stack = made.array(made.word, kib << 7)
        made.struct("thread_union", [("stack", stack)], union=True)
    assert stack_of(made.image, task) == (STACK, size)


def test_names_as_in_the_source() -> None:
    for name in ("dput", "dput.part.0", "dput.isra.0.cold", "dput.constprop.3"):
        assert as_written(name) == "dput"


def test_functions_that_words_point_into(made: MadeMemory) -> None:
    """Each once, in the order of the words; what is not in the kernel's text is no function."""
    text, size = KERNEL, 0x1000
    made.symbol("_stext", text, 0x10)
    made.symbol("_etext", text + size, 0x10)
    for n, name in enumerate(("do_exit", "dput.part.0", "dput")):
        made.symbol(name, text + 0x100 * (n + 1), 0x80)
    made.symbol("__per_cpu_start", 0, 0x1000)
    found = [text + 0x210, text + 0x100, text + 0x17F, text + 0x180, text + 0x300, 8, text + size]
    assert functions_in(made.image, found) == ("dput", "do_exit")
    assert functions_in(made.image, [text, text + size + 1, text - 1]) == ("_stext",)


def test_places_in_functions(made: MadeMemory) -> None:
    """Copies and parts that the compiler makes are included, and of no function too much."""
    made.symbol("kfree", KERNEL, 4)
    made.symbol("kfree.part.0", KERNEL + 0x10, 2)
    made.symbol("kfree.cold", KERNEL + 0x20, 1)
    made.symbol("kfree.isra.0.cold", KERNEL + 0x30, 1)
    made.symbol("kfree_skb", KERNEL + 0x40, 8)
    made.symbol("vfree", KERNEL + 0x100000, 1 << 20)
    places = {KERNEL + n for n in (0, 1, 2, 3, 0x10, 0x11, 0x20, 0x30)}
    assert places_in(made.image, ["kfree", "inlined"]) == places
    assert len(places_in(made.image, ["vfree", "kfree"])) == len(places) + (64 << 10)


def test_tables_that_drgn_cannot_parse(made: MadeMemory, task: Object) -> None:
    """drgn raises Exception for these. What it raises for other reasons stays as it is."""

    class Damaged:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def stack_trace(self, _: Object) -> StackTrace:
            raise self.error

    for error, kind in (
        (Exception("invalid ORC"), ValueError),
        (LookupError("registers"), LookupError),
        (ValueError("it runs"), ValueError),
    ):
        made.image.prog = Damaged(error)  # type: ignore[assignment]
        with pytest.raises(kind, match=str(error)):
            unwind(made.image, task)
