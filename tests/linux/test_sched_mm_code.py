# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which functions set ``active_memcg``, by machine code of x86-64 made by hand."""

from __future__ import annotations

import pytest
from drgn import Architecture, Platform
from support.made_memory import BASE, SIZE, MadeMemory

from memcg_inspect.linux.kernel import sched_mm
from memcg_inspect.linux.kernel.sched_mm import sets_active_memcg

#: Where the member is in ``struct task_struct`` here.
OFFSET = 3008
#: mov 3008(%rdi),%rax; mov %r12,3008(%rbx), and the same with the next member.
LOAD, STORE = bytes.fromhex("488b87c00b0000"), bytes.fromhex("4c89a3c00b0000")
OTHER = bytes.fromhex("488b87c80b0000 4c89a3c80b0000")
CODE = BASE + 0x1000


def machine(known: bytes | None = LOAD + STORE) -> MadeMemory:
    """
    Return a kernel with one function.

    :param known: code of the function that sets the pointer in all kernels; ``None`` without it
    """
    made = MadeMemory()
    words = made.array(made.word, OFFSET // 8)
    made.struct("task_struct", [("before", words), ("active_memcg", made.word)])
    if known is not None:
        function(made, "mem_cgroup_css_alloc", 0, known)
    return made


def function(made: MadeMemory, name: str, number: int, text: bytes) -> int:
    """Make a function of 64 bytes, and return its address."""
    address = CODE + 64 * number
    made.write(address, text.ljust(64, b"\x90"))
    made.symbol(name, address, 64)
    return address


def calls(at: int, *callees: int) -> bytes:
    """Return the code of a function at an address that calls others."""
    text = b""
    for callee in callees:
        text += b"\xe8" + (callee - at - len(text) - 5).to_bytes(4, "little", signed=True)
    return text


@pytest.mark.parametrize(
    ("text", "sets"),
    [(LOAD + STORE, True), (STORE + LOAD, True), (LOAD, False), (STORE, False), (OTHER, False)],
)
def test_functions_that_load_and_store_the_member(text: bytes, sets: bool) -> None:
    made = machine()
    address = function(made, "bpf_map_alloc", 1, text)
    assert sets_active_memcg(made.image, address) is sets
    assert sets_active_memcg(made.image, address) is sets


@pytest.mark.parametrize(
    ("text", "sets"),
    [(STORE, True), (LOAD, False), (LOAD + STORE, False), (OTHER, False)],
)
def test_functions_that_call_one_that_only_stores_the_member(text: bytes, sets: bool) -> None:
    """As bpf_map_memcg_enter() does. One that sets the member on its own sets it back, too."""
    made = machine()
    callee = function(made, "bpf_map_memcg_enter", 1, text)
    nothing = function(made, "kfree", 2, b"")
    at = CODE + 64 * 3
    caller = function(made, "bpf_map_kmalloc_node", 3, calls(at, nothing, callee))
    assert sets_active_memcg(made.image, caller) is sets
    assert sets_active_memcg(made.image, nothing) is False


@pytest.mark.parametrize(
    ("name", "sets"),
    [("set_active_memcg", True), ("set_active_memcg.isra.0", True), ("set_active_memcgs", False)],
)
def test_functions_that_call_the_one_that_is_not_inlined(name: str, sets: bool) -> None:
    made = machine()
    callee = function(made, name, 1, b"")
    first = function(made, "obj_cgroup_memcg", 2, calls(CODE + 64 * 2, callee))
    # A call into the middle of a function is none of it.
    second = function(made, "kmalloc", 3, calls(CODE + 64 * 3, callee + 1))
    assert sets_active_memcg(made.image, first) is sets
    assert sets_active_memcg(made.image, second) is False


def test_the_known_function_tells_whether_code_is_understood() -> None:
    for known in (LOAD, STORE, OTHER, b"", None):
        made = machine(known)
        address = function(made, "bpf_map_alloc", 1, LOAD + STORE)
        assert sets_active_memcg(made.image, address) is None


def test_an_architecture_whose_instructions_are_not_known() -> None:
    made = MadeMemory(Platform(Architecture.RISCV64))
    made.struct("task_struct", [("active_memcg", made.word)])
    assert sets_active_memcg(made.image, CODE) is None


def test_addresses_that_are_no_functions() -> None:
    made = machine()
    address = function(made, "bpf_map_alloc", 1, b"\x90" + LOAD + STORE)
    assert sets_active_memcg(made.image, address) is True
    assert sets_active_memcg(made.image, address + 1) is False  # in the middle of one
    assert sets_active_memcg(made.image, CODE - 64) is False  # no symbol
    made.symbol("missing", BASE - 64, 64)
    assert sets_active_memcg(made.image, BASE - 64) is None  # its code is not in the image


def test_code_that_is_missing() -> None:
    """That of the function itself, or of one that it calls. Code of ``__init`` is freed."""
    made = machine()
    for number, name in enumerate(("missing", "start_kernel"), 2):
        made.symbol(name, BASE - 64 * number, 64)
    caller, nothing = CODE + 64, CODE + 128
    function(made, "caller", 1, calls(caller, nothing, BASE - 128))
    function(made, "nothing", 2, b"")
    assert sets_active_memcg(made.image, nothing) is False
    assert sets_active_memcg(made.image, BASE - 128) is None
    assert sets_active_memcg(made.image, caller) is None
    assert sets_active_memcg(made.image, BASE - 192) is None
    made.symbol("_sinittext", BASE - 192, 0)
    made.symbol("_einittext", BASE - 128, 0)
    image = type(made.image)(made.prog)
    assert sets_active_memcg(image, BASE - 192) is False
    assert sets_active_memcg(image, caller) is None


@pytest.mark.parametrize("more", [0, 1])
def test_functions_are_not_larger_than_a_mebibyte(more: int) -> None:
    """What is larger is damaged, and is not read."""
    made = MadeMemory()
    words = made.array(made.word, OFFSET // 8)
    made.struct("task_struct", [("before", words), ("active_memcg", made.word)])
    made.write(BASE, LOAD + STORE)
    made.symbol("mem_cgroup_css_alloc", BASE, 64)
    assert SIZE == 1 << 20
    made.prog.add_memory_segment(BASE + SIZE, 64, lambda address, count, *_: bytes(count), False)
    assert sets_active_memcg(made.image, BASE) is True
    made.symbol("mem_cgroup_css_alloc", BASE, SIZE + more)
    image = type(made.image)(made.prog)
    assert sets_active_memcg(image, BASE) is (None if more else True)


def test_functions_that_end_with_a_jump() -> None:
    """A function that another one called may have jumped to a third, and that to a fourth."""
    made = machine()
    places = [CODE + 64 * number for number in range(1, 5)]
    for number, place in enumerate(places, 1):
        jump = b"\xe9" + (64 - 5).to_bytes(4, "little")
        assert function(made, f"function{number}", number, jump) == place
    code = sched_mm._code(made.image)
    assert code is not None
    assert [code.continues_in(places[0], {place}) for place in places] == [True, True, True, False]
    assert code.continues_in(places[0], {places[3], places[2]}) is True
    assert code.continues_in(places[0], set()) is False
