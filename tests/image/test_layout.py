# SPDX-License-Identifier: LGPL-2.1-or-later
"""Members of structures that are read word by word, and empty pages of vectors."""

from __future__ import annotations

import pytest
from drgn import Architecture, Object, Platform, PlatformFlags, Program, TypeKind, TypeMember

from memcg_inspect.image.image import image_of
from memcg_inspect.image.layout import word_field
from memcg_inspect.image.memory import SMALLEST_PAGE, filled

BIG = PlatformFlags.IS_64_BIT
LITTLE = BIG | PlatformFlags.IS_LITTLE_ENDIAN


def program(flags: PlatformFlags) -> Program:
    """Return a program with one structure, whose second word is like that of ``struct slab``."""
    prog = Program(Platform(Architecture.UNKNOWN, flags))
    order = "little" if flags & PlatformFlags.IS_LITTLE_ENDIAN else "big"
    word = prog.int_type("unsigned long", 8, False, order)
    half = prog.int_type("unsigned int", 4, False, order)
    members = [TypeMember(word, "slab_cache", 0)]
    members += [
        TypeMember(Object(prog, half, bit_field_size=size), name, bit)
        for name, bit, size in (("inuse", 64, 16), ("objects", 80, 15), ("frozen", 95, 1))
    ]
    members.append(TypeMember(half, "order", 96))
    slab = prog.struct_type("slab", 16, members)

    def find(_: Program, kinds: object, name: str, filename: str | None) -> object:
        return slab if name == "slab" else None

    prog.register_type_finder("by hand", find, enable_index=0)
    assert slab.kind == TypeKind.STRUCT
    return prog


@pytest.mark.parametrize(
    ("flags", "data"),
    [
        # 21 objects in 15 bits and a flag above them: 21 + 0x8000.
        (LITTLE, "efcdab8967452301 0700 1580 03000000"),
        # The first bit field is at the top: 21 * 2 + 1.
        (BIG, "0123456789abcdef 0007 002b 00000003"),
    ],
)
def test_word_by_word(flags: PlatformFlags, data: str) -> None:
    prog = program(flags)
    words = image_of(prog).memory.unpacker(2)(bytes.fromhex(data))
    found = {
        name: word_field(image_of(prog), "struct slab", name).get(words)
        for name in ("slab_cache", "inuse", "objects", "frozen", "order")
    }
    assert found == {
        "slab_cache": 0x0123456789ABCDEF, "inuse": 7, "objects": 21, "frozen": 1, "order": 3,
    }  # fmt: skip


@pytest.mark.parametrize("unit", [8, 24])
def test_only_filled_pages(unit: int) -> None:
    """Each nonzero byte is in one part, parts begin with an element, and are few."""
    data = bytearray(unit * 2000)
    marked = {3 * unit: 1, 3 * unit + 9: 2, 1200 * unit - 1: 3, 2000 * unit - 1: 4}
    for offset, value in marked.items():
        data[offset] = value
    parts = list(filled(bytes(data), unit))
    assert {at + i: b for at, part in parts for i, b in enumerate(part) if b} == marked
    assert all(at % unit == 0 and len(part) <= SMALLEST_PAGE for at, part in parts)
    assert len(parts) == 3
