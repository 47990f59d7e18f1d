# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The BPF Type Format
-------------------

Parses BTF as :linux:`include/uapi/linux/btf.h` defines it, into plain numbers and names. This
module does not use drgn.

A :class:`Btf` parses its header when it is made, indexes all types in one pass when the first one
is needed, and checks each type when it is used.
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

__all__ = ("MAGIC", "Btf", "BtfError", "Encoding", "BtfKind", "Member", "Section")

MAGIC = 0xEB9F

#: ``KSYM_NAME_LEN``. Names of kernel symbols are shorter.
NAME_LIMIT = 512

#: A larger type means that the BTF is damaged.
SIZE_LIMIT = 1 << 28


class BtfError(ImageError):
    """BTF is missing or damaged."""


class BtfKind(IntEnum):
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


# Words after the three of struct btf_type: fixed ones, and those of each of the vlen elements.
_WORDS = dict.fromkeys(map(int, BtfKind), (0, 0)) | {
    BtfKind.INT: (1, 0),
    BtfKind.ARRAY: (3, 0),
    BtfKind.STRUCT: (0, 3),
    BtfKind.UNION: (0, 3),
    BtfKind.ENUM: (0, 2),
    BtfKind.FUNC_PROTO: (0, 2),
    BtfKind.VAR: (1, 0),
    BtfKind.DATASEC: (0, 3),
    BtfKind.DECL_TAG: (1, 0),
    BtfKind.ENUM64: (0, 3),
}

#: Kinds whose third word is a size; in the others it is a type.
_SIZED = frozenset(
    (
        BtfKind.INT,
        BtfKind.STRUCT,
        BtfKind.UNION,
        BtfKind.ENUM,
        BtfKind.DATASEC,
        BtfKind.FLOAT,
        BtfKind.ENUM64,
    )
)


class Encoding(NamedTuple):
    """
    Encoding of an INT.

    :ivar is_signed: whether ``BTF_INT_ENCODING()`` has ``BTF_INT_SIGNED``
    :ivar is_bool: whether ``BTF_INT_ENCODING()`` has ``BTF_INT_BOOL``
    :ivar bit_offset: ``BTF_INT_OFFSET()``, in bits
    :ivar bits: ``BTF_INT_BITS()``
    """

    is_signed: bool
    is_bool: bool
    bit_offset: int
    bits: int


class Member(NamedTuple):
    """
    Member of a structure or union.

    :ivar name: ``""`` for an anonymous member
    :ivar type: id of its type
    :ivar bit_offset: offset in the structure, in bits
    :ivar bits: size of a bit field, in bits; 0 for other members
    """

    name: str
    type: int
    bit_offset: int
    bits: int


class Section(NamedTuple):
    """
    Place of a variable in an ELF section, ``struct btf_var_secinfo``.

    :ivar name: name of the section, e.g. ``.data..percpu``
    :ivar offset: offset in the section, in bytes
    :ivar size: size of the variable, in bytes
    """

    name: str
    offset: int
    size: int


class Btf:
    """
    BTF of a kernel, or split BTF of a module.

    :param data: contents, beginning with ``struct btf_header``
    :param base: BTF that split BTF is based on: type ids and string offsets continue those of the
        base
    :param name: name for error messages
    :raises BtfError: if the header is not valid, or the data is shorter than the header says
    """

    def __init__(self, data: bytes, base: Btf | None = None, name: str = "BTF") -> None:
        self.base = base
        self.name = name
        self._order, types, self._strings = self._parts(data)
        if len(types) % 4:
            raise self.error("is damaged: the size of its types is not a multiple of 4")
        self._words = _words(types, self._order)
        self._string_base: int = base.string_end if base else 0
        self.string_end: int = self._string_base + len(self._strings)
        self._starts: array[int] = array("I")
        self._kinds = b""
        # By string offset of a name: the first type with the name, and all others.
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
            raise self.error(
                f"starts with {data[:2].hex()!r}, which is not the magic number of BTF"
            )
        if len(data) < 24:
            raise self.error(f"is truncated: it has {len(data)} bytes")
        form = "<HBBIIIII" if order == "little" else ">HBBIIIII"
        _, version, _, length, *parts = struct.unpack_from(form, data)
        if version != 1:
            raise self.error(f"has unknown version {version}")
        found = []
        for what, offset, size in (("types", *parts[:2]), ("strings", *parts[2:])):
            start = length + offset
            if length < 24 or start + size > len(data):
                raise self.error(
                    f"is truncated or damaged: its {what} end at byte {start + size} of {len(data)}"
                )
            found.append(data[start : start + size])
        # The strings of split BTF do not begin with an empty one.
        if (self.base is None and found[1][:1] != b"\0") or found[1][-1:] not in (b"\0", b""):
            raise self.error("is damaged: its strings do not begin and end with a NUL")
        return order, found[0], found[1]

    # Index

    def _index(self) -> None:
        """Find the first word and the kind of each type."""
        words, end = self._words, len(self._words)
        fixed, each = [_BAD] * 128, [0] * 128
        for kind, (always, element) in _WORDS.items():
            fixed[kind], each[kind] = 3 + always, element
        starts: list[int] = []
        kinds = bytearray()
        begin, sort = starts.append, kinds.append
        if not self.base:
            begin(0)
            sort(BtfKind.VOID)
        fixed[BtfKind.VOID] = _BAD
        at = 0
        # Older kernels have 16 bits of vlen and 5 of kind; the other bits are 0 there.
        while at + 2 < end:
            info = words[at + 1]
            kind = info >> 24 & 0x7F
            begin(at)
            sort(kind)
            at += fixed[kind] + each[kind] * (info & 0xFFFFFF)
        if at != end:
            last, kind = self.first + len(starts) - 1, kinds[-1] if kinds else 0
            if fixed[kind] == _BAD and last:
                raise self.error(f"has a type ({last}) of unknown kind {kind}")
            raise self.error(f"is damaged: type {last} exceeds the size of its types")
        self._starts, self._kinds = array("I", starts), bytes(kinds)
        # void (type 0) has no words, and so no name.
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
        """Return the id of the first type that is not in the base; 0 without a base."""
        return self.base.end if self.base else 0

    @property
    def end(self) -> int:
        """Return the id of the last type plus 1."""
        if not self._starts and (self._words or not self.base):
            self._index()
        return self.first + len(self._starts)

    def owner(self, number: int) -> Btf:
        """
        Return the BTF that has a type: this one or its base.

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

    def kind(self, number: int) -> BtfKind:
        """Return the kind of a type."""
        self._at(number)
        return _BY_NUMBER[self._kinds[number - self.first]]

    def flag(self, number: int) -> bool:
        """Return the ``kind_flag`` of a type."""
        return bool(self._words[self._at(number) + 1] >> 31)

    def name_of(self, number: int) -> str:
        """Return the name of a type; ``""`` for an anonymous one."""
        return self.string(self._words[self._at(number)]) if number else ""

    def is_named(self, number: int) -> bool:
        """Return whether a type has a name."""
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
        """Return the id of the element type of an ARRAY, and the number of elements."""
        at = self._at(number)
        return self._words[at + 3], self._words[at + 5]

    def members(self, number: int) -> Iterator[Member]:
        """Walk the members of a STRUCT or UNION."""
        flag = self.flag(number)
        for name, type_, offset in self._elements(number, 3):
            bits = offset >> 24 if flag else 0
            yield Member(self.string(name), type_, offset & 0xFFFFFF if flag else offset, bits)

    def member_types(self, number: int) -> list[int]:
        """Return the type ids of the members of a STRUCT or UNION."""
        return [type_ for _, type_, _ in self._elements(number, 3)]

    def enumerators(self, number: int) -> Iterator[tuple[str, int]]:
        """Walk the names and values of an ENUM or ENUM64."""
        wide, is_signed = self.kind(number) == BtfKind.ENUM64, self.flag(number)
        sign = 1 << (63 if wide else 31) if is_signed else 0
        for name, low, *high in self._elements(number, 3 if wide else 2):
            value = high[0] << 32 | low if wide else low
            yield self.string(name), (value ^ sign) - sign

    def parameters(self, number: int) -> list[tuple[str, int]]:
        """Return the names and type ids of the parameters of a FUNC_PROTO."""
        return [(self.string(name), type_) for name, type_ in self._elements(number, 2)]

    # Names

    def string(self, offset: int) -> str:
        """
        Return the string at an offset.

        :raises BtfError: if there is none, or it is longer than a name can be
        """
        if offset < self._string_base and self.base is not None:
            return self.base.string(offset)
        start = offset - self._string_base
        end = self._strings.find(b"\0", start, start + NAME_LIMIT)
        if end < 0:
            raise self.error(f"is damaged: it has no string at {offset} of {self.string_end}")
        return self._strings[start:end].decode(errors="backslashreplace")

    def _offsets(self, name: str) -> tuple[int, ...]:
        """Return the offsets of a string: pahole writes each string once, and no suffix of one."""
        if self._places is None:
            strings = self._strings.split(b"\0")
            ends = accumulate([len(string) + 1 for string in strings], initial=self._string_base)
            # If a string occurs twice (damaged BTF), take the first.
            self._places = dict(zip(reversed(strings), reversed([*ends][:-1]), strict=True))
        found = self.base._offsets(name) if self.base else ()
        at = self._places.get(name.encode(errors="surrogateescape"))
        return found if at is None else (*found, at)

    def find(self, name: str, *kinds: BtfKind) -> list[int]:
        """Return the ids of types with a name, lowest first, without those of the base."""
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

    def of_kind(self, *kinds: BtfKind) -> Iterator[int]:
        """Walk the ids of all types of some kinds, lowest first, without those of the base."""
        self.end  # noqa: B018  (indexes)
        found = []
        for kind in kinds:
            at = self._kinds.find(kind)
            while at >= 0:
                found.append(at + self.first)
                at = self._kinds.find(kind, at + 1)
        yield from sorted(found)

    def complete(self, number: int) -> int | None:
        """Return the definition that a FWD declares; ``None`` if there is none, or several."""
        name = self.name_of(number)
        kind = BtfKind.UNION if self.flag(number) else BtfKind.STRUCT
        btf: Btf | None = self
        while btf is not None:
            found = btf.find(name, kind)
            if found:
                return found[0] if len(found) == 1 else None
            btf = btf.base
        return None

    def enumerator(self, name: str) -> int | None:
        """Return the id of the first ENUM or ENUM64 of this BTF with an enumerator of a name."""
        offsets = self._offsets(name)
        if not offsets:
            return None
        if self._enumerators is None:
            self._enumerators = {}
            words = self._words
            for number in self.of_kind(BtfKind.ENUM, BtfKind.ENUM64):
                at, size = self._at(number), 2 if self.kind(number) == BtfKind.ENUM else 3
                end = at + 3 + size * (words[at + 1] & 0xFFFFFF)
                for text in words[at + 3 : end : size].tolist():
                    self._enumerators.setdefault(text, number)
        for offset in offsets:
            if offset in self._enumerators:
                return self._enumerators[offset]
        return None

    def section(self, number: int) -> Section | None:
        """Return the place of a VAR; ``None`` if no DATASEC has it."""
        if self._sections is None:
            self._sections = {
                var: Section(self.name_of(datasec), offset, size)
                for datasec in self.of_kind(BtfKind.DATASEC)
                for var, offset, size in self._elements(datasec, 3)
            }
        return self._sections.get(number)


_BY_NUMBER = tuple(BtfKind)

#: Number of words of an unknown kind: larger than any BTF, so that _index() stops.
_BAD = 1 << 40


def _words(data: bytes, order: Literal["little", "big"]) -> memoryview:
    if order == sys.byteorder:
        return memoryview(data).cast("I")
    swapped = array("I", data)
    swapped.byteswap()
    return memoryview(swapped)
