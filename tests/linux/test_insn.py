# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code of powerpc and of s390, as the GNU assembler writes it.

tests/linux/test_arm64_insn.py is about arm64.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from drgn import Architecture, Platform, PlatformFlags, Program

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch import arm64_insn, powerpc_insn, s390_insn, x86_insn
from memcg_inspect.linux.arch.insn import Instructions, instructions

ONE = 0x3FFE0100000


@dataclass(frozen=True)
class Code:
    """
    Two functions, one after the other.

    :ivar text: of the first, one instruction each
    :ivar second: of the second
    :ivar calls: callees, by the offset of the return address
    :ivar jumps: offsets from the first function that it jumps to
    """

    known: Instructions
    text: tuple[str, ...]
    second: tuple[str, ...]
    calls: dict[int, int]
    jumps: set[int]

    @property
    def bytes(self) -> bytes:
        return bytes.fromhex("".join(self.text))

    @property
    def end(self) -> int:
        return len(self.bytes)


POWERPC = Code(
    powerpc_insn,
    (
        "c00b23e9",  # ld r9,3008(r3)
        "c00b5ff9",  # std r10,3008(r31)
        "c80b21e9",  # ld r9,3016(r1)
        "f5ffff4b",  # bl one
        "14000048",  # b two
        "11000048",  # bl two
        "d00b2381",  # lwz r9,3024(r3)
        "d90b23e9",  # ldu r9,3032(r3)
        "e0ff0042",  # bdnz one
    ),
    ("2104804e", "2000804e"),  # bctrl, blr
    {16: 0, 24: 36},
    {36},
)
S390 = Code(
    s390_insn,
    (
        "e3102bc00004",  # lg %r1,3008(%r2)
        "e330bbc00024",  # stg %r3,3008(%r11)
        "e31021701104",  # lg %r1,70000(%r2)
        "e310fbc80004",  # lg %r1,3016(%r15)
        "c0e5fffffff4",  # brasl %r14,one
        "c0f400000010",  # jg two
        "a7f4ffee",  # j one
        "c0e50000000b",  # brasl %r14,two
        "c05500000008",  # brasl %r5,two
        "58102bd0",  # l %r1,3024(%r2)
        "e3142bd00004",  # lg %r1,3024(%r4,%r2)
    ),
    ("0de1", "07fe"),  # basr %r14,%r1; br %r14
    {30: 0, 46: 62},
    {62, 0},
)
BOTH = pytest.mark.parametrize("code", [POWERPC, S390], ids=["powerpc", "s390"])


@BOTH
def test_members(code: Code) -> None:
    known, text = code.known, code.bytes
    assert known.loads_member(text, 3008)
    assert known.stores_member(text, 3008)
    # The stack, half a word, an instruction that does more, and an index register.
    for offset in (3000, 3010, 3016, 3024, 3032, 1 << 15, 1 << 20, -8):
        assert not known.loads_member(text, offset)
        assert not known.stores_member(text, offset)
    assert s390_insn.loads_member(S390.bytes, 70000)
    assert not s390_insn.loads_member(S390.bytes, 70000 - 65536)


def test_where_functions_begin() -> None:
    """On powerpc, calls within the kernel go to the local entry, which does not set r2 (ELFv2)."""
    assert powerpc_insn.ENTRIES == (0, 8)
    assert s390_insn.ENTRIES == (0,)
    assert (powerpc_insn.CALL_SIZE, s390_insn.CALL_SIZE) == (4, 6)


@BOTH
def test_calls_and_jumps(code: Code) -> None:
    known, text = code.known, code.bytes
    assert known.called(text, ONE) == {ONE + to for to in code.calls.values()}
    assert known.jumped_to(text, ONE) == {ONE + to for to in code.jumps}
    second = bytes.fromhex("".join(code.second))
    assert known.called(second, ONE) == known.jumped_to(second, ONE) == set()


@BOTH
def test_the_call_before_a_return_address(code: Code) -> None:
    known, text, size = code.known, code.bytes, code.known.CALL_SIZE
    found = {}
    for at in range(size, len(text) + 1, 2):
        callee = known.called_before(text[at - size : at], ONE + at)
        if callee is not None:
            found[at] = callee - ONE
    assert found == code.calls
    assert known.called_before(text[:2], ONE + 2) is None


@BOTH
@pytest.mark.parametrize("size", [0, 1, 3, 5])
def test_text_that_ends_in_an_instruction(code: Code, size: int) -> None:
    known, text = code.known, code.bytes[:size]
    assert known.called(text, ONE) == known.jumped_to(text, ONE) == set()
    assert known.loads_member(text, 3008) == (size >= len(code.text[0]) // 2)


def test_instructions_begin_at_even_addresses() -> None:
    assert not s390_insn.loads_member(b"\0" + bytes.fromhex(S390.text[0]) + b"\0", 3008)
    assert s390_insn.loads_member(b"\0\0" + bytes.fromhex(S390.text[0]), 3008)


def test_instructions_behind_bytes_that_look_like_the_first_one() -> None:
    """The first byte of an instruction can be the last one of the instruction before it."""
    assert s390_insn.loads_member(b"\0\xe3" + bytes.fromhex(S390.text[0]), 3008)


def test_the_bounds_of_offsets_on_s390() -> None:
    first, largest = "e31020000004", "e3102fff7f04"  # lg %r1,0(%r2); lg %r1,524287(%r2)
    assert s390_insn.loads_member(bytes.fromhex(first), 0)
    assert s390_insn.loads_member(bytes.fromhex(largest), (1 << 19) - 1)
    # The highest bit is a sign: lg %r1,-524288(%r2)
    assert not s390_insn.loads_member(bytes.fromhex("e31020008004"), 1 << 19)
    # Without a base register, it is an address: lg %r1,3008
    assert not s390_insn.loads_member(bytes.fromhex("e3100bc00004"), 3008)


def test_the_bounds_of_offsets_on_powerpc() -> None:
    largest, negative = "fc7f23e9", "008023e9"  # ld r9,32764(r3); ld r9,-32768(r3)
    assert powerpc_insn.loads_member(bytes.fromhex("000023e9"), 0)
    assert powerpc_insn.loads_member(bytes.fromhex(largest), 32764)
    assert not powerpc_insn.loads_member(bytes.fromhex(negative), 32768)
    assert not powerpc_insn.loads_member(bytes.fromhex(negative), -32768)


def test_addresses_wrap_around() -> None:
    assert s390_insn.called(bytes.fromhex("c0e5fffffff4"), 0) == {(1 << 64) - 24}
    assert s390_insn.called(bytes.fromhex("c0e500000010"), (1 << 64) - 8) == {24}
    assert powerpc_insn.called(bytes.fromhex("f5ffff4b"), 0) == {(1 << 64) - 12}


PLATFORM_FLAGS = PlatformFlags.IS_64_BIT | PlatformFlags.IS_LITTLE_ENDIAN


@pytest.mark.parametrize(
    ("platform", "known"),
    [
        (Platform(Architecture.X86_64), x86_insn),
        (Platform(Architecture.AARCH64), arm64_insn),
        (Platform(Architecture.S390X), s390_insn),
        (Platform(Architecture.PPC64, PLATFORM_FLAGS), powerpc_insn),
        # Functions of big-endian kernels are described by descriptors.
        (Platform(Architecture.PPC64, PlatformFlags.IS_64_BIT), None),
        (Platform(Architecture.RISCV64), None),
    ],
)
def test_instructions_of_each_architecture(platform: Platform, known: Instructions | None) -> None:
    assert instructions(Image(Program(platform))) is known


def test_thunks() -> None:
    assert s390_insn.is_thunk("__s390_indirect_jump_r1")
    assert not s390_insn.is_thunk("kfree")
    assert not powerpc_insn.is_thunk("kfree")


def test_entries_of_functions() -> None:
    """Calls from the kernel itself skip what sets up the table of contents."""
    assert powerpc_insn.ENTRIES == (0, 8)
    assert s390_insn.ENTRIES == (0,)
