# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The BPF Type Format
-------------------

Takes BTF apart as :linux:`include/uapi/linux/btf.h` defines it, from bytes to plain numbers
and names, and checks each thing when it is asked for. Knows nothing of drgn.

Only the header is looked at when a :class:`Btf` is made; the types are indexed, in one pass,
when the first of them is asked for.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from enum import IntEnum
from itertools import accumulate
from typing import Literal, NamedTuple

from memcg_inspect.model import ImageError

__all__ = ("MAGIC", "Btf", "BtfError", "Encoding", "Kind", "Member", "Section")

MAGIC = 0xEB9F

#: ``KSYM_NAME_LEN``: no kernel takes longer names.
NAME_LIMIT = 512

#: No object of a kernel is larger; what claims to be is damaged.
SIZE_LIMIT = 1 << 28


class BtfError(ImageError):
    """BTF that is missing or damaged."""


class Kind(IntEnum):
    """``BTF_KIND_*``."""

    VOID = 0
    INT = 1
    PTR = 2
    ARRAY = 3
    STRUCT = 4
    UNION = 5
    ENUM = 6
    FWD = 7
    TYPEDEF = 8
    VOLATILE = 9
    CONST = 10
    RESTRICT = 11
    FUNC = 12
    FUNC_PROTO = 13
    VAR = 14
    DATASEC = 15
    FLOAT = 16
    DECL_TAG = 17
    TYPE_TAG = 18
    ENUM64 = 19


# Words behind the three that every type has: always, and for each of its vlen elements.
_WORDS = dict.fromkeys(map(int, Kind), (0, 0)) | {
    Kind.INT: (1, 0),
    Kind.ARRAY: (3, 0),
    Kind.STRUCT: (0, 3),
    Kind.UNION: (0, 3),
    Kind.ENUM: (0, 2),
    Kind.FUNC_PROTO: (0, 2),
    Kind.VAR: (1, 0),
    Kind.DATASEC: (0, 3),
    Kind.DECL_TAG: (1, 0),
    Kind.ENUM64: (0, 3),
}

#: Kinds whose third word is a size; in the others it is a type.
_SIZED = frozenset(
    (Kind.INT, Kind.STRUCT, Kind.UNION, Kind.ENUM, Kind.DATASEC, Kind.FLOAT, Kind.ENUM64)
)


class Encoding(NamedTuple):
    """How an INT is to be understood: ``BTF_INT_ENCODING``, ``_OFFSET`` and ``_BITS``."""

    is_signed: bool
    is_bool: bool
    bit_offset: int
    bits: int


class Member(NamedTuple):
    """
    One member of a structure or union.

    :ivar name: ``""`` if it has none
    :ivar type: id of its type
    :ivar bit_offset: from the start of the structure
    :ivar bits: size of a bit field; 0 if it is none
    """

    name: str
    type: int
    bit_offset: int
    bits: int


class Section(NamedTuple):
    """
    Where a variable lies.

    :ivar name: section of the kernel's ELF file, e.g. ``.data..percpu``
    """

    name: str
    offset: int
    size: int


class Btf:
    """
    The BTF of a kernel, or of a module on top of its kernel's.

    :param data: all of it, header first
    :param base: BTF that this one continues (split BTF); ids and offsets of strings count on
        from there
    :param name: what to call it in messages
    :raises BtfError: if it is no BTF, or its parts lie outside of it
    """

    def __init__(self, data: bytes, base: Btf | None = None, name: str = "BTF") -> None:
        self.base = base
        self.name = name
        self._order, types, self._strings = self._parts(data)
        if len(types) % 4:
            raise self.error("is damaged: its types are no whole number of words")
        self._words = _words(types, self._order)
        self._string_base: int = base.string_end if base else 0
        self.string_end: int = self._string_base + len(self._strings)
        self._starts: array[int] = array("I")
        self._kinds = b""
        # by offset of a name: the first type that has it, and all others
        self._ids: dict[int, int] = {}
        self._more: list[tuple[int, int]] = []
        self._found: dict[str, tuple[int, ...]] = {}
        self._places: dict[bytes, int] | None = None
        self._enumerators: dict[int, int] | None = None
        self._sections: dict[int, Section] | None = None

    def error(self, what: str) -> BtfError:
        """Return an error that names this BTF."""
        return BtfError(f"{self.name} {what}")

    def _parts(self, data: bytes) -> tuple[Literal["little", "big"], bytes, bytes]:
        order: Literal["little", "big"] = "little"
        if data[:2] == MAGIC.to_bytes(2, "big"):
            order = "big"
        elif data[:2] != MAGIC.to_bytes(2, "little"):
            raise self.error(f"does not start with its magic number but with {data[:2].hex()!r}")
        if len(data) < 24:
            raise self.error(f"is truncated: it has {len(data)} bytes")
        form = "<HBBIIIII" if order == "little" else ">HBBIIIII"
        _, version, _, length, *parts = struct.unpack_from(form, data)
        if version != 1:
            raise self.error(f"has version {version}, which is not known")
        found = []
        for what, offset, size in (("types", *parts[:2]), ("strings", *parts[2:])):
            start = length + offset
            if length < 24 or start + size > len(data):
                raise self.error(
                    f"is truncated or damaged: its {what} end at byte {start + size} of {len(data)}"
                )
            found.append(data[start : start + size])
        # Split BTF has no empty string of its own to begin with.
        if (self.base is None and found[1][:1] != b"\0") or found[1][-1:] not in (b"\0", b""):
            raise self.error("is damaged: its strings do not begin and end with a NUL")
        return order, found[0], found[1]

    # Index

    def _index(self) -> None:
        """Find the start and the kind of each type."""
        words, end = self._words, len(self._words)
        fixed, each = [_BAD] * 128, [0] * 128
        for kind, (always, element) in _WORDS.items():
            fixed[kind], each[kind] = 3 + always, element
        starts: list[int] = []
        kinds = bytearray()
        begin, sort = starts.append, kinds.append
        if not self.base:
            begin(0)
            sort(Kind.VOID)
        fixed[Kind.VOID] = _BAD
        at = 0
        # In older kernels vlen has 16 bits and kind 5; the others are 0 there.
        while at + 2 < end:
            info = words[at + 1]
            kind = info >> 24 & 0x7F
            begin(at)
            sort(kind)
            at += fixed[kind] + each[kind] * (info & 0xFFFFFF)
        if at != end:
            last, kind = self.first + len(starts) - 1, kinds[-1] if kinds else 0
            if fixed[kind] == _BAD and last:
                raise self.error(f"has a type ({last}) of kind {kind}, which is not known")
            raise self.error(f"is damaged: type {last} reaches past its end")
        self._starts, self._kinds = array("I", starts), bytes(kinds)
        # void has no name, and no words at all.
        first = 0 if self.base else 1
        ids, more = self._ids, self._more
        for number, at in enumerate(starts[first:], self.first + first):
            name = words[at]
            if name not in ids:
                ids[name] = number
            elif name:
                more.append((name, number))

    @property
    def first(self) -> int:
        """The id of the first type of its own; 0 if there is no base."""
        return self.base.end if self.base else 0

    @property
    def end(self) -> int:
        """The id behind the last type."""
        if not self._starts and (self._words or not self.base):
            self._index()
        return self.first + len(self._starts)

    def owner(self, number: int) -> Btf:
        """
        Return the BTF, this one or a base of it, that has a type.

        :raises BtfError: if no such type exists
        """
        if not 0 <= number < self.end:
            raise self.error(f"is damaged: it refers to type {number} of {self.end}")
        return self if number >= self.first or self.base is None else self.base.owner(number)

    def _at(self, number: int) -> int:
        if not self.first <= number < self.end:
            raise self.error(f"is damaged: it refers to type {number} of {self.end}")
        return self._starts[number - self.first]

    # One type

    def kind(self, number: int) -> Kind:
        """Return what a type is."""
        self._at(number)
        return _BY_NUMBER[self._kinds[number - self.first]]

    def flag(self, number: int) -> bool:
        """Return its ``kind_flag``."""
        return bool(self._words[self._at(number) + 1] >> 31)

    def name_of(self, number: int) -> str:
        """Return its name, ``""`` if it has none."""
        return self.string(self._words[self._at(number)]) if number else ""

    def is_named(self, number: int) -> bool:
        """Return whether it has a name."""
        return bool(number and self._words[self._at(number)])

    def size(self, number: int) -> int:
        """Return the size of an INT, FLOAT, STRUCT, UNION, ENUM, ENUM64 or DATASEC in bytes."""
        if self.kind(number) not in _SIZED:
            raise self.error(f"is damaged: type {number} has no size")
        size = self._words[self._at(number) + 2]
        if size > SIZE_LIMIT:
            raise self.error(f"is damaged: type {number} has {size} bytes")
        return size

    def target(self, number: int) -> int:
        """Return the id of the type that a PTR, TYPEDEF, CONST, FUNC, VAR, ... refers to."""
        return self._words[self._at(number) + 2]

    def _elements(self, number: int, size: int) -> Iterator[tuple[int, ...]]:
        at = self._at(number)
        vlen = self._words[at + 1] & 0xFFFFFF
        words = self._words[at + 3 : at + 3 + size * vlen].tolist()
        return zip(*(iter(words),) * size, strict=True)

    def encoding(self, number: int) -> Encoding:
        """Return the encoding of an INT."""
        word = self._words[self._at(number) + 3]
        return Encoding(bool(word >> 24 & 1), bool(word >> 24 & 4), word >> 16 & 0xFF, word & 0xFF)

    def array(self, number: int) -> tuple[int, int]:
        """Return the type of the elements of an ARRAY, and their number."""
        at = self._at(number)
        return self._words[at + 3], self._words[at + 5]

    def members(self, number: int) -> Iterator[Member]:
        """Walk the members of a STRUCT or UNION."""
        flag = self.flag(number)
        for name, type_, offset in self._elements(number, 3):
            bits = offset >> 24 if flag else 0
            yield Member(self.string(name), type_, offset & 0xFFFFFF if flag else offset, bits)

    def member_types(self, number: int) -> list[int]:
        """Return the types of the members of a STRUCT or UNION."""
        return [type_ for _, type_, _ in self._elements(number, 3)]

    def enumerators(self, number: int) -> Iterator[tuple[str, int]]:
        """Walk the names and values of an ENUM or ENUM64."""
        wide, is_signed = self.kind(number) == Kind.ENUM64, self.flag(number)
        sign = 1 << (63 if wide else 31) if is_signed else 0
        for name, low, *high in self._elements(number, 3 if wide else 2):
            value = high[0] << 32 | low if wide else low
            yield self.string(name), (value ^ sign) - sign

    def parameters(self, number: int) -> list[tuple[str, int]]:
        """Return names and types of the parameters of a FUNC_PROTO."""
        return [(self.string(name), type_) for name, type_ in self._elements(number, 2)]

    # Names

    def string(self, offset: int) -> str:
        """
        Return the string at an offset.

        :raises BtfError: if there is none, or it is too long for a name
        """
        if offset < self._string_base and self.base is not None:
            return self.base.string(offset)
        start = offset - self._string_base
        end = self._strings.find(b"\0", start, start + NAME_LIMIT)
        if end < 0:
            raise self.error(f"is damaged: it has no string at {offset} of {self.string_end}")
        return self._strings[start:end].decode(errors="backslashreplace")

    def _offsets(self, name: str) -> tuple[int, ...]:
        """Where a string is; each exists once, and no string shares its end with another."""
        if self._places is None:
            strings = self._strings.split(b"\0")
            ends = accumulate([len(string) + 1 for string in strings], initial=self._string_base)
            # Of equal ones in damaged BTF, the first.
            self._places = dict(zip(reversed(strings), reversed([*ends][:-1]), strict=True))
        found = self.base._offsets(name) if self.base else ()
        at = self._places.get(name.encode(errors="surrogateescape"))
        return found if at is None else (*found, at)

    def find(self, name: str, *kinds: Kind) -> list[int]:
        """Return the ids of types of its own with a name, lowest first."""
        ids = self._found.get(name)
        if ids is None:
            ids = self._found[name] = tuple(self._find(name)) if name and "\0" not in name else ()
        return [number for number in ids if self.kind(number) in kinds] if ids else []

    def _find(self, name: str) -> list[int]:
        offsets = self._offsets(name)
        if not offsets or not self.end:
            return []
        found = [self._ids[offset] for offset in offsets if offset in self._ids]
        if found:
            found += [number for name, number in self._more if name in offsets]
        return sorted(found)

    def of_kind(self, *kinds: Kind) -> Iterator[int]:
        """Walk the ids of all types of its own that are of some kinds."""
        self.end  # noqa: B018  (indexes)
        found = []
        for kind in kinds:
            at = self._kinds.find(kind)
            while at >= 0:
                found.append(at + self.first)
                at = self._kinds.find(kind, at + 1)
        yield from sorted(found)

    def complete(self, number: int) -> int | None:
        """Return the definition that a FWD stands for, if there is no doubt which."""
        name = self.name_of(number)
        kind = Kind.UNION if self.flag(number) else Kind.STRUCT
        btf: Btf | None = self
        while btf is not None:
            found = btf.find(name, kind)
            if found:
                return found[0] if len(found) == 1 else None
            btf = btf.base
        return None

    def enumerator(self, name: str) -> int | None:
        """Return the id of the first ENUM or ENUM64 of its own with an enumerator of a name."""
        offsets = self._offsets(name)
        if not offsets:
            return None
        if self._enumerators is None:
            self._enumerators = {}
            words = self._words
            for number in self.of_kind(Kind.ENUM, Kind.ENUM64):
                at, size = self._at(number), 2 if self.kind(number) == Kind.ENUM else 3
                end = at + 3 + size * (words[at + 1] & 0xFFFFFF)
                for text in words[at + 3 : end : size].tolist():
                    self._enumerators.setdefault(text, number)
        for offset in offsets:
            if offset in self._enumerators:
                return self._enumerators[offset]
        return None

    def section(self, number: int) -> Section | None:
        """Return where a VAR lies."""
        if self._sections is None:
            self._sections = {
                var: Section(self.name_of(datasec), offset, size)
                for datasec in self.of_kind(Kind.DATASEC)
                for var, offset, size in self._elements(datasec, 3)
            }
        return self._sections.get(number)


_BY_NUMBER = tuple(Kind)

#: An advance that leaves no doubt that the pass went wrong.
_BAD = 1 << 40


def _words(data: bytes, order: Literal["little", "big"]) -> memoryview:
    if order == sys.byteorder:
        return memoryview(data).cast("I")
    swapped = array("I", data)
    swapped.byteswap()
    return memoryview(swapped)
