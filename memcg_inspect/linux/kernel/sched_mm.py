# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs that are charged instead of a task's own
-----------------------------------------------

Mirrors ``set_active_memcg()`` of :linux:`include/linux/sched/mm.h`. It sets
``current->active_memcg``, or, in an interrupt, the per-CPU variable ``int_active_memcg``.
Allocations are charged to that memcg until the caller sets the old value again. The caller holds a
reference to the memcg, which may be a removed one.

So while the pointer is set, a function that sets it is on the stack. Such a function is told by its
machine code, not by its name: it loads and stores the member ``active_memcg``, since
``set_active_memcg()`` is inlined, or it calls that function where it is not (s390). In newer
kernels (7.2 is one), users of BPF maps call ``bpf_map_memcg_enter()`` and ``bpf_map_memcg_exit()``
instead. So a function that calls one that only stores the member counts, too.

Not only the frames of a stack are read, but all words of its used part. Kernel code needs no frame
pointers, and without debug info drgn cannot unwind it. If no word is an address in a function that
sets the pointer, then no frame is. A word may be left over from an earlier call. So such a word is
taken for a return address only if the function that it was calling, or one that this jumped to, has
an address further down the stack.

A function sets one of the two pointers: that of the task, or in an interrupt handler that of the
CPU. The preempt count tells whether a CPU was in one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from drgn import FaultError, Object, SymbolKind, offsetof
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.sched import cpu_curr, task_cpu

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.insn import Instructions, instructions
from memcg_inspect.linux.arch.processor import (
    code_addresses,
    is_kernel_address,
    saved_stack_pointer,
)
from memcg_inspect.linux.kernel.preempt import in_interrupt_handler
from memcg_inspect.linux.kernel.stacktrace_words import as_written, other_stack, unwind
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.linux.mm.vmalloc import thread_size
from memcg_inspect.model import Coverage
from memcg_inspect.model_tasks import ActiveMemcg, TaskCharge

__all__ = ("read_active_memcgs", "sets_active_memcg")

#: A function that sets the pointer in all kernels. If it does not look like one, then this compiler
#: uses other instructions.
_KNOWN = "mem_cgroup_css_alloc"
#: Sets the pointer if it is not inlined, and returns.
_SETTER = "set_active_memcg"
#: No function has more bytes of code.
_MOST_TEXT = 1 << 20
#: A function that ends with a call jumps instead. So may the one that it calls.
_MOST_JUMPS = 2
#: How often a task of a running kernel is read until it does not run meanwhile.
_MOST_TRIES = 10
#: Seconds between them. Most functions set the pointer for less time.
_PAUSE = 0.002

_RAN = "it ran while its stack was read"
_NO_REGISTERS = "the registers of its CPU are not in the image"


class _Code:
    """
    Finder of functions that set the pointer.

    :ivar unread: addresses of functions whose code could not be read: they may set it
    """

    def __init__(self, image: Image, known: Instructions) -> None:
        self._image, self.instructions = image, known
        self._offset = offsetof(image.type("struct task_struct"), "active_memcg")
        self._kinds: dict[int, tuple[bool, bool]] = {}
        self._sets: dict[int, bool] = {}
        self.unread: set[int] = set()

    def is_known(self) -> bool:
        """Return whether such functions can be told in this kernel."""
        try:
            return self.sets(self._image.symbol(_KNOWN).address)
        except UnknownKernelError:
            return False

    def function(self, address: int) -> tuple[int, str] | None:
        """Return the function that an address is in, but not at its start: address, name."""
        if not is_kernel_address(self._image.prog, address):
            return None
        try:
            symbol = self._image.symbol(address)
        except UnknownKernelError:
            return None
        # Functions written in assembly may have a symbol without a kind.
        if symbol.kind not in (SymbolKind.FUNC, SymbolKind.UNKNOWN) or symbol.address == address:
            return None
        return symbol.address, symbol.name

    def sets(self, function: int) -> bool:
        """
        Return whether a function sets the pointer.

        :param function: address of the function
        """
        found = self._sets.get(function)
        if found is None:
            inlines = self._kind(function) == (True, True)
            text = b"" if inlines else self._text(function)
            called = list(self._functions(self.instructions.called(text, function)))
            found = self._sets[function] = inlines or any(
                self._kind(other) == (False, True) or self._is(_SETTER, other) for other in called
            )
            if not found and not self.unread.isdisjoint(called):
                self.unread.add(function)
        return found

    def _is(self, name: str, function: int) -> bool:
        """Return whether the function at an address has a name in the source."""
        try:
            symbol = self._image.symbol(function)
        except UnknownKernelError:
            return False
        return bool(symbol.address == function and as_written(symbol.name) == name)

    def continues_in(self, function: int, others: Set[int]) -> bool:
        """Return whether a function is one of some others, or may end with a jump to one."""
        reached = {function}
        for _ in range(_MOST_JUMPS):
            if not reached.isdisjoint(others):
                return True
            jumped_to = self.instructions.jumped_to
            reached = {
                to for one in reached for to in self._functions(jumped_to(self._text(one), one))
            }
        return not reached.isdisjoint(others)

    def _functions(self, places: Set[int]) -> Iterator[int]:
        """Yield the addresses that functions have if these are entries of theirs."""
        for place in places:
            for entry in self.instructions.ENTRIES:
                yield place - entry

    def _kind(self, function: int) -> tuple[bool, bool]:
        """Return whether a function loads the member, and whether it stores it."""
        found = self._kinds.get(function)
        if found is None:
            text = self._text(function)
            found = self._kinds[function] = (
                self.instructions.loads_member(text, self._offset),
                self.instructions.stores_member(text, self._offset),
            )
        return found

    def _text(self, function: int) -> bytes:
        try:
            symbol = self._image.symbol(function)
            if symbol.address != function or symbol.size > _MOST_TEXT:
                return b""
            return self._image.memory.read(symbol.address, symbol.size)
        except UnknownKernelError:
            return b""
        except FaultError:
            if not self._is_init(function):
                self.unread.add(function)
            return b""

    def _is_init(self, function: int) -> bool:
        """Return whether the code of a function was freed after boot (``__init``)."""
        try:
            start, end = (self._image.symbol(f"_{which}inittext") for which in "se")
        except UnknownKernelError:
            return False
        return bool(start.address <= function < end.address)


@per_image
def _code(image: Image) -> _Code | None:
    known = instructions(image)
    if known is None:
        return None
    code = _Code(image, known)
    return code if code.is_known() else None


def sets_active_memcg(image: Image, address: int) -> bool | None:
    """
    Return whether a function sets ``active_memcg``.

    :param address: address of the function
    :return: ``None`` if this cannot be told in this kernel, or if the code cannot be read
    """
    code = _code(image)
    if code is None:
        return None
    return code.sets(address) or (None if address in code.unread else False)


class _Place(NamedTuple):
    """
    Where the pointer was set.

    :ivar function: name of the function; ``None`` if none was found
    :ivar why_unknown: why it is not known whether there is one; ``None`` if it is known
    """

    function: str | None = None
    why_unknown: str | None = None


def _find(image: Image, words: Iterable[int], *, skip: int = 0) -> _Place:
    """
    Find the function that set the pointer.

    :param words: the program counter and the words of the stack, innermost first
    :param skip: how many of the innermost functions set another pointer
    """
    code = _code(image)
    if code is None:
        return _Place(None, "functions that set active_memcg are not known on this kernel")
    called_from: set[int] = set()
    doubtful = unread = None
    for word in code_addresses(image, words):
        found = code.function(word)
        if found is None:
            continue
        function, name = found
        if code.sets(function):
            callee = _callee(image, code.instructions, word)
            if callee is None or code.continues_in(callee, called_from):
                if not skip:
                    return _Place(name)
                skip -= 1
            doubtful = name
        elif function in code.unread:
            unread = unread or name
        called_from.add(function)
    if doubtful is not None:
        return _Place(None, f"{doubtful}() may be on the stack, or may be left over from a call")
    if unread is not None:
        return _Place(None, f"the code of {unread}(), which may set it, is not in the image")
    return _Place()


def _callee(image: Image, known: Instructions, address: int) -> int | None:
    """
    Return the function that the call before a return address calls directly.

    :return: ``None`` if the call is indirect, or if the address is that of the next instruction
    """
    try:
        text = image.memory.read(address - known.CALL_SIZE, known.CALL_SIZE)
    except FaultError:
        return None
    callee = known.called_before(text, address)
    if callee is None:
        return None
    try:
        symbol = image.symbol(callee)
    except UnknownKernelError:
        return None
    if known.is_thunk(symbol.name) or callee - symbol.address not in known.ENTRIES:
        return None
    return int(symbol.address)


def read_active_memcgs(
    image: Image, tasks: Iterable[TaskCharge], coverage: Coverage
) -> list[ActiveMemcg]:
    """
    Return the memcgs that are charged instead of a task's own.

    :param tasks: all tasks
    :param coverage: counts what is unreadable
    """
    found: list[ActiveMemcg] = []
    for task in tasks:
        if not task.active_memcg:
            continue
        try:
            found += _of_task(image, task)
        except (FaultError, UnknownKernelError) as error:
            address = error.address if isinstance(error, FaultError) else task.address
            coverage.miss("stack of a task", address, str(error))
    try:
        found += _of_cpus(image)
    except FaultError as error:
        coverage.miss("int_active_memcg of a CPU", error.address, str(error))
    return found


class _State(NamedTuple):
    """
    What changes while a task runs.

    :ivar memcg: ``active_memcg``
    :ivar is_running: ``on_cpu``
    :ivar switches: ``nvcsw`` and ``nivcsw``
    """

    memcg: int
    is_running: bool
    switches: int


def _state(image: Image, task: Object) -> _State:
    on_cpu = has_member(image, "struct task_struct", "on_cpu")  # CONFIG_SMP
    return _State(
        memcg=int(task.active_memcg.value_()),
        is_running=bool(on_cpu and task.on_cpu),
        switches=int(task.nvcsw) + int(task.nivcsw),
    )


def _of_task(image: Image, task: TaskCharge) -> Iterator[ActiveMemcg]:
    struct = image.pointer("struct task_struct *", task.address)
    state, place = _state(image, struct), _Place(None, _RAN)
    for _ in range(_MOST_TRIES):
        if not image.is_moving:
            if state.is_running:
                place = _place_of_running(image, struct)
            else:
                place = _find(image, _words(image, struct))
            break
        if not state.is_running:
            place = _find(image, _words(image, struct))
        after = _state(image, struct)
        if after == state and not state.is_running:
            break
        if after.memcg != state.memcg:
            return  # a function set the old value again
        time.sleep(_PAUSE)
        state, place = after, _Place(None, _RAN)
    if state.memcg:
        name = f"{task.comm} ({task.pid})"
        yield ActiveMemcg(state.memcg, name, task.address, task.memcg, *place)


def _words(image: Image, task: Object) -> list[int]:
    """
    Return the words of the used part of the stack of a task that does not run.

    :param task: ``struct task_struct *``
    :raises drgn.FaultError: if the stack is not in the image
    """
    memory, start = image.memory, int(task.stack.value_())
    end, first = start + thread_size(image), start
    sp = saved_stack_pointer(image, task)
    if sp is not None and start <= sp < end:
        first = sp
    first -= first % memory.word_size
    return memory.words(memory.read(first, end - first))


class _Stacks(NamedTuple):
    """
    Where a task was that a CPU was running.

    :ivar own: words of the used part of its stack, innermost first, after the program counter if it
        was on this stack
    :ivar other: the program counter and the words of the stack that the CPU was on, e.g. that of
        interrupts; empty if it was on the stack of the task
    """

    own: list[int]
    other: list[int]

    @property
    def words(self) -> list[int]:
        return self.other + self.own


def _running_stacks(image: Image, task: Object) -> _Stacks | None:
    """
    Return the words of the stacks of a task that a CPU was running.

    :param task: ``struct task_struct *``
    :return: only the program counter if the CPU was in user mode; ``None`` if the registers are not
        in the image
    """
    try:
        frame = unwind(image, task)[0]
        pc, sp = frame.pc, frame.sp
    except (FaultError, LookupError, ValueError):
        return None
    if not is_kernel_address(image.prog, pc):
        return _Stacks([pc], [])
    pc = _within(image, pc)
    memory, start = image.memory, int(task.stack.value_())
    end = start + thread_size(image)
    sp -= sp % memory.word_size
    if start <= sp < end:
        return _Stacks([pc, *memory.words(memory.read(sp, end - sp))], [])
    own = memory.words(memory.read(start, end - start))
    return _Stacks(list(own), [pc, *other_stack(image, sp)])


def _within(image: Image, pc: int) -> int:
    """
    Return an address in the function of a program counter.

    A program counter may be at the start of a function, a return address is not.
    """
    try:
        symbol = image.symbol(pc)
    except UnknownKernelError:
        return pc
    return pc + 1 if symbol.address == pc else pc


def _place_of_running(image: Image, task: Object) -> _Place:
    """
    Find the function that set ``active_memcg`` of a task that a CPU was running.

    An interrupt that came upon the task may be charging another memcg, too. One function on the
    stack sets one of the two pointers only.

    :param task: ``struct task_struct *``
    """
    stacks = _running_stacks(image, task)
    if stacks is None:
        return _Place(None, _NO_REGISTERS)
    cpu = task_cpu(task)
    if not in_interrupt_handler(image, cpu, task):
        return _find(image, stacks.words)
    if stacks.other or not _interrupt_charges(image, cpu):
        return _find(image, stacks.own)
    return _second(image, stacks.own)


def _place_of_interrupt(image: Image, cpu: int) -> _Place:
    """Find the function that set ``int_active_memcg`` of a CPU."""
    task = cpu_curr(image.prog, cpu)
    handles = in_interrupt_handler(image, cpu, task)
    if handles is False:
        return _Place()
    stacks = _running_stacks(image, task)
    if stacks is None:
        return _Place(None, _NO_REGISTERS)
    if not handles or not task.active_memcg:
        return _find(image, stacks.words)
    place = _find(image, stacks.other)
    return place if place.function is not None else _second(image, stacks.words)


def _second(image: Image, words: Iterable[int]) -> _Place:
    """Return a place if two functions on the stack set a pointer."""
    words = list(words)
    place, inner = _find(image, words, skip=1), _find(image, words)
    if place.function is None and inner.function is not None:
        why = f"{inner.function}() set active_memcg either of the task or of an interrupt"
        return _Place(None, why)
    return place


def _stays(pointer: Object, memcg: int) -> bool:
    """
    Return whether a pointer of a running kernel keeps its value.

    :param pointer: ``struct mem_cgroup **``
    """
    for _ in range(_MOST_TRIES):
        time.sleep(_PAUSE)
        if int(pointer[0].value_()) != memcg:
            return False
    return True


def _of_cpus(image: Image) -> Iterator[ActiveMemcg]:
    for cpu in possible_cpus(image):
        pointer = _int_active_memcg(image, cpu)
        if pointer is None:
            return  # no interrupt of this kernel charges another memcg
        memcg = int(pointer[0].value_())
        if not memcg:
            continue
        if image.is_moving:
            if _stays(pointer, memcg):
                yield ActiveMemcg(memcg, f"CPU {cpu}", None, None, None, _RAN)
            continue
        yield ActiveMemcg(memcg, f"CPU {cpu}", None, None, *_place_of_interrupt(image, cpu))


def _int_active_memcg(image: Image, cpu: int) -> Object | None:
    """
    Return ``struct mem_cgroup **``, or ``None`` if interrupts of this kernel charge no memcg.

    Linux kernel commit 37d5985c003d ("mm: kmem: prepare remote memcg charging infra for interrupt
    contexts") (in v5.10)
    """
    try:
        variable = image.object("int_active_memcg")
    except UnknownKernelError:
        return None
    return per_cpu_ptr(variable.address_of_(), cpu)


def _interrupt_charges(image: Image, cpu: int) -> bool:
    """Return whether ``int_active_memcg`` of a CPU is set."""
    pointer = _int_active_memcg(image, cpu)
    return pointer is not None and bool(pointer[0])
