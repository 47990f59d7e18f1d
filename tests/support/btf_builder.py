# SPDX-License-Identifier: LGPL-2.1-or-later
"""Write BTF for tests: single types, or some types of a kernel."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Literal

from memcg_inspect.btf.parse import Btf, BtfKind

Order = Literal["little", "big"]

#: Which word of each element is a name, or the id of a type; the others are plain numbers.
_NAMES = {
    BtfKind.STRUCT: 0,
    BtfKind.UNION: 0,
    BtfKind.ENUM: 0,
    BtfKind.ENUM64: 0,
    BtfKind.FUNC_PROTO: 0,
}
_TYPES = {BtfKind.STRUCT: 1, BtfKind.UNION: 1, BtfKind.FUNC_PROTO: 1, BtfKind.DATASEC: 0}
_WIDTH = {
    BtfKind.STRUCT: 3,
    BtfKind.UNION: 3,
    BtfKind.ENUM: 2,
    BtfKind.ENUM64: 3,
    BtfKind.FUNC_PROTO: 2,
    BtfKind.DATASEC: 3,
}


class Builder:
    """Collect types and write them; with ``base``, as split BTF."""

    def __init__(self, base: Btf | None = None) -> None:
        self.records: list[list[int]] = []
        self.strings = b"" if base else b"\0"
        self.first_string = base.string_end if base else 0
        self.first = base.end if base else 1
        self._known: dict[str, int] = {}

    def name(self, text: str) -> int:
        if not text:
            return 0
        if text not in self._known:
            self._known[text] = self.first_string + len(self.strings)
            self.strings += text.encode() + b"\0"
        return self._known[text]

    def add(
        self,
        kind: BtfKind,
        name: str = "",
        third: int = 0,
        words: Iterable[int] = (),
        vlen: int = 0,
        flag: bool = False,
    ) -> int:
        info = flag << 31 | kind << 24 | vlen
        self.records.append([self.name(name), info, third, *words])
        return self.first + len(self.records) - 1

    def int(self, name: str, size: int, encoding: int = 0) -> int:
        return self.add(BtfKind.INT, name, size, [encoding << 24 | 8 * size])

    def to(self, kind: BtfKind, target: int, name: str = "") -> int:
        return self.add(kind, name, target)

    def array(self, element: int, length: int, index: int = 0) -> int:
        return self.add(BtfKind.ARRAY, "", 0, [element, index, length])

    def compound(
        self,
        kind: BtfKind,
        name: str,
        size: int,
        members: Sequence[tuple[str, int, int] | tuple[str, int, int, int]],
    ) -> int:
        flag = any(len(member) == 4 for member in members)
        words: list[int] = []
        for text, type_, offset, *bits in members:
            words += [self.name(text), type_, offset | (bits[0] << 24 if bits else 0)]
        return self.add(kind, name, size, words, len(members), flag)

    def enum(self, name: str, size: int, values: dict[str, int], wide: bool = False) -> int:
        words: list[int] = []
        for text, value in values.items():
            words += [self.name(text), value & 0xFFFFFFFF]
            if wide:
                words.append(value >> 32 & 0xFFFFFFFF)
        flag = any(value < 0 for value in values.values())
        return self.add(
            BtfKind.ENUM64 if wide else BtfKind.ENUM, name, size, words, len(values), flag
        )

    def prototype(self, returns: int, parameters: Sequence[tuple[str, int]]) -> int:
        words = [w for text, type_ in parameters for w in (self.name(text), type_)]
        return self.add(BtfKind.FUNC_PROTO, "", returns, words, len(parameters))

    def data(self, order: Order = "little") -> bytes:
        form = "<" if order == "little" else ">"
        words = [word for record in self.records for word in record]
        types = struct.pack(f"{form}{len(words)}I", *words)
        return (
            struct.pack(
                f"{form}HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(self.strings)
            )  # fmt: skip
            + types
            + self.strings
        )


def subset(btf: Btf, names: Sequence[str], limit: int) -> Builder:
    """Copy types of a kernel's BTF, and what they refer to, until there are *limit* bytes."""
    builder, todo = Builder(), [n for name in names for n in btf.find(name, *BtfKind)]
    chosen: dict[int, int] = {}
    bytes_ = 0
    while todo and bytes_ < limit:
        number = todo.pop(0)
        if number == 0 or number in chosen:
            continue
        chosen[number] = len(chosen) + 1
        raw = _raw(btf, number)
        bytes_ += 4 * len(raw) + len(btf.name_of(number)) + 12 * len(raw) // 3
        todo += _refers(btf, number, raw)
    for number in chosen:
        builder.records.append(_copy(btf, number, chosen, builder))
    return builder


def _raw(btf: Btf, number: int) -> list[int]:
    start = btf._at(number)
    end = btf._at(number + 1) if number + 1 < btf.end else len(btf._words)
    return btf._words[start:end].tolist()


def _targets(btf: Btf, number: int, raw: list[int]) -> list[int]:
    """Return the indexes in *raw* of ids of types."""
    kind = btf.kind(number)
    if kind == BtfKind.ARRAY:
        return [3, 4]
    sized = (BtfKind.INT, BtfKind.STRUCT, BtfKind.UNION, BtfKind.ENUM, BtfKind.ENUM64,
             BtfKind.FLOAT, BtfKind.FWD, BtfKind.DATASEC)  # fmt: skip
    places = [] if kind in sized else [2]
    if kind in _TYPES:
        places += range(3 + _TYPES[kind], len(raw), _WIDTH[kind])
    return places


def _refers(btf: Btf, number: int, raw: list[int]) -> list[int]:
    return [raw[place] for place in _targets(btf, number, raw)]


def _copy(btf: Btf, number: int, chosen: dict[int, int], builder: Builder) -> list[int]:
    raw, kind = _raw(btf, number), btf.kind(number)
    places = [0, *range(3, len(raw), _WIDTH[kind])] if kind in _NAMES else [0]
    for place in places:
        raw[place] = builder.name(btf.string(raw[place]))
    for place in _targets(btf, number, _raw(btf, number)):
        # A type that was not copied becomes void, which only a pointer may refer to.
        raw[place] = chosen.get(raw[place], 0)
    return raw
