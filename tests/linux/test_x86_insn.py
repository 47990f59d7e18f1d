# SPDX-License-Identifier: LGPL-2.1-or-later
"""Machine code of x86-64, as the GNU assembler writes it."""

from __future__ import annotations

import pytest

from memcg_inspect.linux.arch import x86_insn
from memcg_inspect.linux.arch.x86_insn import (
    called,
    called_before,
    is_thunk,
    jumped_to,
    loads_member,
    stores_member,
)

RETURN = 0xFFFFFFFF81000105


@pytest.mark.parametrize(
    ("text", "callee"),
    [
        ("e8 fb 0f 00 00", 0xFFFFFFFF81001100),  # call .+0x1000
        ("e8 fb fe ff ff", RETURN - 0x105),  # call .-0x100
        ("e9 fb 0f 00 00", None),  # jmp
        ("00 00 00 ff d0", None),  # call *%rax
        ("e8 fb 0f 00", None),  # the text begins in the middle of it
        ("", None),
    ],
)
def test_the_call_before_a_return_address(text: str, callee: int | None) -> None:
    assert called_before(bytes.fromhex(text), RETURN) == callee


ONE = 0xFFFFFFFF81000000
#: A function and, behind it, another one.
TEXT = bytes.fromhex(
    "488b87c00b0000"  # mov 0xbc0(%rdi),%rax
    "4c89a3c00b0000"  # mov %r12,0xbc0(%rbx)
    "498b8424c80b0000"  # mov 0xbc8(%r12),%rax
    "8b87d00b0000"  # mov 0xbd0(%rdi),%eax
    "488b5710"  # mov 0x10(%rdi),%rdx
    "e8dbffffff"  # call one
    "e90a000000"  # jmp two
    "e805000000"  # call two
    "ffd0"  # call *%rax
    "5b"  # pop %rbx
    "c3"  # ret
    "90"  # nop
)
TWO = ONE + len(TEXT)


def test_members() -> None:
    for offset in (0xBC0, 0xBC8):
        assert loads_member(TEXT, offset)
    assert stores_member(TEXT, 0xBC0)
    # a load, and half a word
    assert not stores_member(TEXT, 0xBC8)
    for offset in (0xBD0, 0xBB8, 0xBC0 << 8, 0xBC00, 128):
        assert not loads_member(TEXT, offset)
        assert not stores_member(TEXT, offset)


@pytest.mark.parametrize("rex", [0x48, 0x49, 0x4C, 0x4D])
@pytest.mark.parametrize("offset", [128, 0x2E2E2E2E, 0x5C0A0D5D])
def test_the_fields_of_all_instructions(rex: int, offset: int) -> None:
    """Registers, and offsets of bytes that mean something else in a pattern, or end a line."""
    displacement = offset.to_bytes(4, "little")
    for modrm in range(0x80, 0xC0):
        sib = b"\x24" if modrm & 7 == 4 else b""
        for opcode in (0x8B, 0x89):
            text = bytes([0x90, rex, opcode, modrm]) + sib + displacement
            assert loads_member(text, offset) == (opcode == 0x8B)
            assert stores_member(text, offset) == (opcode == 0x89)
            assert not loads_member(text[:-1], offset)
            assert not stores_member(text, offset ^ 0x100)


def test_operands_of_other_forms_are_no_members() -> None:
    offset = (0xBC0).to_bytes(4, "little")
    for prefix, modrm in ((0x40, 0x87), (0x48, 0x47), (0x48, 0x07), (0x48, 0xC7), (0x66, 0x87)):
        for opcode, found in ((0x8B, loads_member), (0x89, stores_member)):
            assert not found(bytes([prefix, opcode, modrm]) + offset, 0xBC0)


@pytest.mark.parametrize("offset", [0, 127])
def test_offsets_that_have_a_shorter_form_are_refused(offset: int) -> None:
    for found in (loads_member, stores_member):
        with pytest.raises(AssertionError):
            found(TEXT, offset)


def test_calls_and_jumps() -> None:
    assert called(TEXT, ONE) == {ONE, TWO}
    assert jumped_to(TEXT, ONE) == {TWO}
    assert called(TEXT[-3:], ONE) == jumped_to(TEXT[-3:], ONE) == set()


def test_the_first_and_the_last_bytes_can_be_a_call() -> None:
    call = bytes.fromhex("e800010000")
    assert called(call, ONE) == {ONE + 0x105}
    assert called(b"\x90" + call, ONE) == {ONE + 0x106}
    assert called(call[:-1], ONE) == called(b"", ONE) == set()
    # Bytes of one can look like another.
    assert called(bytes.fromhex("e8e800000000"), ONE) == {ONE + 5 + 0xE8, ONE + 6}
    assert jumped_to(bytes.fromhex("e900010000"), ONE) == {ONE + 0x105}


def test_addresses_wrap_around() -> None:
    assert called(bytes.fromhex("e8f0ffffff"), 0) == {(1 << 64) - 11}
    assert called_before(bytes.fromhex("e8f0ffffff"), 5) == (1 << 64) - 11
    assert called(bytes.fromhex("e800010000"), (1 << 64) - 5) == {0x100}


def test_thunks() -> None:
    assert is_thunk("__x86_indirect_thunk_rax")
    assert is_thunk("__x86_indirect_call_thunk_rdx")
    assert is_thunk("__pi___x86_indirect_thunk_rax")
    assert not is_thunk("kfree")
    assert not is_thunk("x86_indirect")


def test_functions_have_one_entry() -> None:
    assert x86_insn.ENTRIES == (0,)
    assert x86_insn.CALL_SIZE == 5
