# SPDX-License-Identifier: LGPL-2.1-or-later
"""Machine code of arm64, as the GNU assembler writes it."""

from __future__ import annotations

import pytest

from memcg_inspect.linux.arch import arm64_insn
from memcg_inspect.linux.arch.arm64_insn import CALL_SIZE, called, called_before, jumped_to

#: Where the first function is, and where the second one.
ONE = 0xFFFF800080010000
TWO = ONE + 32
#: of the first function, except for the last instruction
TEXT = bytes.fromhex(
    "01e045f9"  # ldr x1, [x0, #3008]
    "62e205f9"  # str x2, [x19, #3008]
    "feffff97"  # bl one
    "05000014"  # b two
    "04000094"  # bl two
    "e1e745f9"  # ldr x1, [sp, #3016]
    "01d04bb9"  # ldr w1, [x0, #3024]
    "20ffff54"  # b.eq one
)
SECOND = bytes.fromhex(
    "9f0a00f9"  # str xzr, [x20, #16]
    "00013fd6"  # blr x8
    "c0035fd6"  # ret
)


def test_members() -> None:
    assert arm64_insn.loads_member(TEXT, 3008)
    assert arm64_insn.stores_member(TEXT, 3008)
    assert not arm64_insn.loads_member(SECOND, 16)
    assert arm64_insn.stores_member(SECOND, 16)


@pytest.mark.parametrize("offset", [3000, 3012, 3016, 3024, 3008 + 8 * 4096])
def test_what_is_no_load_of_a_member(offset: int) -> None:
    """The stack, half a word, and offsets that the instruction cannot have."""
    assert not arm64_insn.loads_member(TEXT, offset)
    assert not arm64_insn.stores_member(TEXT, offset)


def test_calls_and_jumps() -> None:
    assert called(TEXT, ONE) == {ONE, TWO}
    assert jumped_to(TEXT, ONE) == {TWO}
    assert called(SECOND, TWO) == jumped_to(SECOND, TWO) == set()


def test_the_call_before_a_return_address() -> None:
    calls = {}
    for at in range(CALL_SIZE, len(TEXT) + 1, CALL_SIZE):
        calls[at] = called_before(TEXT[at - CALL_SIZE : at], ONE + at)
    assert {at: callee for at, callee in calls.items() if callee is not None} == {12: ONE, 20: TWO}
    assert called_before(SECOND[4:8], TWO + 8) is None  # indirect


@pytest.mark.parametrize("size", [0, 1, 3, 5, 34])
def test_text_that_ends_in_an_instruction(size: int) -> None:
    text = TEXT[:size]
    assert called(text, ONE) == called(TEXT[: size // 4 * 4], ONE)
    assert arm64_insn.loads_member(text, 3008) == (size >= 4)
    assert called_before(text[:3], ONE + 12) is None


def test_addresses_wrap_around() -> None:
    assert called(bytes.fromhex("feffff97"), 0) == {(1 << 64) - 8}


def test_the_fields_of_all_instructions() -> None:
    """Each offset is found under its own number, whatever the registers are."""
    for register in (0, 9, 30):
        for offset in range(0, 32761, 8):
            text = (0xF9400000 | offset // 8 << 10 | register << 5 | 7).to_bytes(4, "little")
            assert arm64_insn.loads_member(text, offset)
            assert not arm64_insn.loads_member(text, offset ^ 8)


def test_functions_have_one_entry_and_there_are_no_thunks() -> None:
    assert arm64_insn.ENTRIES == (0,)
    assert not arm64_insn.is_thunk("kfree")
    assert not arm64_insn.is_thunk("__x86_indirect_thunk_rax")
