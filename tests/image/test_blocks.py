# SPDX-License-Identifier: LGPL-2.1-or-later
"""Blocks of memory that are read once for the small structures in them."""

from __future__ import annotations

import pytest
from drgn import Architecture, FaultError, Platform, Program

from memcg_inspect.image.memory import SMALLEST_PAGE, Blocks, Memory

BASE, PAGES = 0x100000, 4_000


def made(missing: int | None = None) -> Memory:
    """Each word is its own address. A page may be missing."""
    prog = Program(Platform(Architecture.X86_64))

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        for page in range(address // SMALLEST_PAGE, (address + count - 1) // SMALLEST_PAGE + 1):
            if page * SMALLEST_PAGE == missing:
                raise FaultError("not in the image", address)
        first = address - address % 8
        words = b"".join(n.to_bytes(8, "little") for n in range(first, address + count, 8))
        return words[address - first :][:count]

    prog.add_memory_segment(BASE, PAGES * SMALLEST_PAGE, read, False)
    return Memory(prog)


def test_what_is_near_is_read_once() -> None:
    memory = made()
    blocks = Blocks(memory)
    for address in range(BASE, BASE + 2 * SMALLEST_PAGE, 8):
        assert blocks.word(address) == address
    assert blocks.read(BASE + 4, 8) == memory.read(BASE + 4, 8)
    assert memory.reads == 3


def test_what_crosses_two_blocks_is_read_by_itself() -> None:
    memory = made()
    border = BASE + SMALLEST_PAGE
    assert Blocks(memory).read(border - 8, 16) == memory.read(border - 8, 16)


def test_a_block_that_is_missing() -> None:
    memory = made(missing=BASE + SMALLEST_PAGE)
    blocks = Blocks(memory)
    assert blocks.word(BASE + SMALLEST_PAGE - 8) == BASE + SMALLEST_PAGE - 8
    for _ in range(2):
        with pytest.raises(FaultError, match="not in the image") as caught:
            blocks.word(BASE + SMALLEST_PAGE + 16)
        assert caught.value.address == BASE + SMALLEST_PAGE + 16


def test_not_all_blocks_are_kept() -> None:
    """Those that were not used for the longest time are read again."""
    memory = made()
    blocks = Blocks(memory)
    for page in range(PAGES):
        blocks.word(BASE + page * SMALLEST_PAGE)
        blocks.word(BASE)
    before = memory.reads
    blocks.word(BASE)
    blocks.word(BASE + (PAGES - 1) * SMALLEST_PAGE)
    assert memory.reads == before
    blocks.word(BASE + SMALLEST_PAGE)
    assert memory.reads == before + 1
