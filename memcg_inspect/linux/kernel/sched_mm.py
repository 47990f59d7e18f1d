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
``set_active_memcg()`` is inlined. In newer kernels (7.2 is one), users of BPF maps call
``bpf_map_memcg_enter()`` and ``bpf_map_memcg_exit()`` instead. So a function that calls one that
only stores the member counts, too.

Not only the frames of a stack are read, but all words of its used part. Kernel code needs no frame
pointers, and without debug info drgn cannot unwind it. If no word is an address in a function that
sets the pointer, then no frame is. A word may be left over from an earlier call. So such a word is
taken for a return address only if the function that it was calling, or one that this jumped to, has
an address further down the stack.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from drgn import Architecture, FaultError, Object, SymbolKind, offsetof
from drgn.helpers.linux.percpu import per_cpu_ptr
from drgn.helpers.linux.sched import cpu_curr

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import SMALLEST_PAGE
from memcg_inspect.linux.arch.x86_insn import (
    called,
    called_before,
    jumped_to,
    loads_member,
    stores_member,
)
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.linux.mm.vmalloc import thread_size
from memcg_inspect.model import Coverage
from memcg_inspect.model_tasks import ActiveMemcg, TaskCharge

__all__ = ("read_active_memcgs", "sets_active_memcg")

#: A function that sets the pointer in all kernels. If it does not look like one, then this compiler
#: uses other instructions.
_KNOWN = "mem_cgroup_css_alloc"
#: No function has more bytes of code.
_MOST_TEXT = 1 << 20
#: A function that ends with a call jumps instead. So may the one that it calls.
_MOST_JUMPS = 2
#: Bytes that a direct call takes.
_CALL_SIZE = 5
#: How often a task of a running kernel is read until it does not run meanwhile.
_MOST_TRIES = 10
#: Seconds between them. Most functions set the pointer for less time.
_PAUSE = 0.002
#: Addresses of the kernel have this bit set.
_KERNEL = 1 << 63

_RAN = "it ran while its stack was read"
_NO_REGISTERS = "the registers of its CPU are not in the image"


class _Code:
    """Finder of functions that set the pointer."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._offset = offsetof(image.type("struct task_struct"), "active_memcg")
        self._kinds: dict[int, tuple[bool, bool]] = {}
        self._sets: dict[int, bool] = {}

    def is_known(self) -> bool:
        """Return whether such functions can be told in this kernel."""
        platform = self._image.prog.platform
        if platform is None or platform.arch != Architecture.X86_64:
            return False
        try:
            return self.sets(self._image.symbol(_KNOWN).address)
        except UnknownKernelError:
            return False

    def function(self, address: int) -> tuple[int, str] | None:
        """Return the function that an address is in, but not at its start: address, name."""
        if not address & _KERNEL:
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
            loads, stores = self._kind(function)
            text = b"" if loads and stores else self._text(function)
            found = self._sets[function] = (loads and stores) or any(
                self._kind(other) == (False, True) for other in called(text, function)
            )
        return found

    def continues_in(self, function: int, others: Set[int]) -> bool:
        """Return whether a function is one of some others, or may end with a jump to one."""
        reached = {function}
        for _ in range(_MOST_JUMPS):
            if not reached.isdisjoint(others):
                return True
            reached = {to for one in reached for to in jumped_to(self._text(one), one)}
        return not reached.isdisjoint(others)

    def _kind(self, function: int) -> tuple[bool, bool]:
        """Return whether a function loads the member, and whether it stores it."""
        found = self._kinds.get(function)
        if found is None:
            text = self._text(function)
            found = self._kinds[function] = (
                loads_member(text, self._offset),
                stores_member(text, self._offset),
            )
        return found

    def _text(self, function: int) -> bytes:
        try:
            symbol = self._image.symbol(function)
            if symbol.address != function or symbol.size > _MOST_TEXT:
                return b""
            return self._image.memory.read(symbol.address, symbol.size)
        except (UnknownKernelError, FaultError):
            return b""


@per_image
def _code(image: Image) -> _Code | None:
    code = _Code(image)
    return code if code.is_known() else None


def sets_active_memcg(image: Image, address: int) -> bool | None:
    """
    Return whether a function sets ``active_memcg``.

    :param address: address of the function
    :return: ``None`` if this cannot be told in this kernel
    """
    code = _code(image)
    return None if code is None else code.sets(address)


class _Place(NamedTuple):
    """
    Where the pointer was set.

    :ivar function: name of the function; ``None`` if none was found
    :ivar why_unknown: why it is not known whether there is one; ``None`` if it is known
    """

    function: str | None = None
    why_unknown: str | None = None


def _find(image: Image, words: Iterable[int]) -> _Place:
    """
    Find the function that set the pointer.

    :param words: the program counter and the words of the stack, innermost first
    """
    code = _code(image)
    if code is None:
        return _Place(None, "functions that set active_memcg are not known on this kernel")
    called_from: set[int] = set()
    doubtful: str | None = None
    for word in words:
        found = code.function(word)
        if found is None:
            continue
        function, name = found
        if code.sets(function):
            callee = _callee(image, word)
            if callee is None or code.continues_in(callee, called_from):
                return _Place(name)
            doubtful = name
        called_from.add(function)
    if doubtful is not None:
        return _Place(None, f"{doubtful}() may be on the stack, or may be left over from a call")
    return _Place()


def _callee(image: Image, address: int) -> int | None:
    """
    Return the function that the call before a return address calls directly.

    :return: ``None`` if the call is indirect, or if the address is that of the next instruction
    """
    try:
        text = image.memory.read(address - _CALL_SIZE, _CALL_SIZE)
    except FaultError:
        return None
    callee = called_before(text, address)
    if callee is None:
        return None
    try:
        symbol = image.symbol(callee)
    except UnknownKernelError:
        return None
    # A retpoline is an indirect call.
    is_thunk = symbol.name.startswith(("__x86_indirect", "__pi___x86_indirect"))
    return None if is_thunk or symbol.address != callee else callee


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
    struct = Object(image.prog, "struct task_struct *", task.address)
    state, place = _state(image, struct), _Place(None, _RAN)
    for _ in range(_MOST_TRIES):
        if not image.is_moving:
            words = _running_words(image, struct) if state.is_running else _words(image, struct)
            place = _Place(None, _NO_REGISTERS) if words is None else _find(image, words)
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
    if has_member(image, "struct thread_struct", "sp"):  # x86
        sp = int(task.thread.sp)
        first = sp if start <= sp < end else start
    first -= first % memory.word_size
    return memory.words(memory.read(first, end - first))


def _running_words(image: Image, task: Object) -> list[int] | None:
    """
    Return the program counter and the words of the stacks of a task that a CPU was running.

    :param task: ``struct task_struct *``
    :return: only the program counter if the CPU was in user mode; ``None`` if the registers are not
        in the image
    """
    try:
        frame = image.prog.stack_trace(task)[0]
        pc, sp = frame.pc, frame.sp
    except (FaultError, LookupError, ValueError):
        return None
    if not pc & _KERNEL:
        return [pc]
    words = [pc]
    start = int(task.stack.value_())
    if not start <= sp < start + thread_size(image):
        words += _other_stack(image, sp - sp % image.memory.word_size)
        sp = start
    sp -= sp % image.memory.word_size
    return words + image.memory.words(image.memory.read(sp, start + thread_size(image) - sp))


def _other_stack(image: Image, sp: int) -> Iterator[int]:
    """Return the words on a stack of unknown size, e.g. of an interrupt."""
    memory, address = image.memory, sp
    while address < sp + thread_size(image):
        end = address - address % SMALLEST_PAGE + SMALLEST_PAGE
        try:
            yield from memory.words(memory.read(address, end - address))
        except FaultError:
            return
        address = end


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
    try:
        variable = image.object("int_active_memcg").address_of_()
    except UnknownKernelError:
        return  # no interrupt of this kernel charges another memcg
    for cpu in possible_cpus(image):
        pointer = per_cpu_ptr(variable, cpu)
        memcg = int(pointer[0].value_())
        if not memcg:
            continue
        if image.is_moving:
            if _stays(pointer, memcg):
                yield ActiveMemcg(memcg, f"CPU {cpu}", None, None, None, _RAN)
            continue
        words = _running_words(image, cpu_curr(image.prog, cpu))
        place = _Place(None, _NO_REGISTERS) if words is None else _find(image, words)
        yield ActiveMemcg(memcg, f"CPU {cpu}", None, None, *place)
