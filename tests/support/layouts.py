# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Types and memory made by hand, for readers of kernels that the lab does not have.

A test declares the members that its reader uses, as the source of one release has them. Structures
are laid out as on x86-64.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

from drgn import (
    Architecture,
    FaultError,
    FindObjectFlags,
    Object,
    Platform,
    Program,
    Symbol,
    SymbolBinding,
    SymbolKind,
    Type,
    TypeEnumerator,
    TypeKind,
    TypeKindSet,
    TypeMember,
    alignof,
    offsetof,
    sizeof,
)

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mmzone import MemMap, mem_map, possible_cpus

T = TypeVar("T")

_DECLARATION = re.compile(
    r"(?P<type>.*?)(?P<stars>\**)\s*(?P<name>\w+)(?P<arrays>(\[\d+\])*)\s*(:\s*(?P<bits>\d+))?$",
    re.DOTALL,
)
_PAGE = 4096
#: Of x86-64 with ``NODES_SHIFT`` 1.
FRAMES = MemMap(
    base=0xFFFFEA0000000000,
    size=64,
    page_shift=12,
    flags=0,
    node_shift=63,
    node_mask=1,
    direct_map=0xFFFF888000000000,
)
#: ``page->flags`` of a page on node 1.
NODE_1 = 1 << 63


class _Member(NamedTuple):
    """A member of a structure; ``find`` returns its type when it is first used."""

    name: str | None
    size: int
    align: int
    find: Callable[[], Any]
    bits: int | None = None


def _same(value: T) -> T:
    return value


class MadeImage(Image):
    """
    An image without a kernel: two CPUs, and memory as :data:`FRAMES` says.

    :ivar given: results of functions that run once for each image, by function
    """

    def __init__(self) -> None:
        prog = Program(Platform(Architecture.X86_64))
        super().__init__(prog)
        self.given: dict[Callable[..., Any], Any] = {mem_map: FRAMES, possible_cpus: (0, 1)}
        self._types: dict[tuple[TypeKind, str], Type] = {}
        self._alignments: dict[str, int] = {}
        self._objects: dict[str, Object] = {}
        self._symbols: dict[str, Symbol] = {}
        self._pages: dict[int, bytearray] = {}
        prog.register_type_finder("made", self._find_type, enable_index=0)
        prog.register_object_finder("made", self._find_object, enable_index=0)
        prog.register_symbol_finder("made", self._find_symbols, enable_index=0)
        prog.add_memory_segment(1 << 63, 1 << 63, self._read_memory)
        prog.add_memory_segment(0, 1 << 48, self._read_memory, physical=True)

    def once(self, find: Callable[[Image], T]) -> T:
        for function, result in self.given.items():
            if getattr(function, "__wrapped__", None) is find:
                return result  # type: ignore[no-any-return]
        return super().once(find)

    def _find_type(self, _: Program, kinds: TypeKindSet, name: str, __: str | None) -> Type | None:
        return next((t for (k, n), t in self._types.items() if n == name and k in kinds), None)

    def _find_object(
        self, _: Program, name: str, flags: FindObjectFlags, __: str | None
    ) -> Object | None:
        return self._objects.get(name)

    def _find_symbols(
        self, _: Program, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        return [s for n, s in self._symbols.items() if name in (None, n) and address is None]

    def _read_memory(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        data = b""
        while len(data) < count:
            at = address + len(data)
            page = self._pages.get(at // _PAGE)
            if page is None:
                raise FaultError("not made", at)
            data += page[at % _PAGE : at % _PAGE + count - len(data)]
        return data

    def declare(self, text: str) -> None:
        """
        Declare structures in C, those that others contain first.

        Members are integers, pointers, arrays, bit fields, structures that were declared, and
        anonymous structures and unions.
        """
        for kind, name, body in _definitions(text):
            compound, align = self._compound(kind, name, body)
            self._types[_KINDS[kind], name] = compound
            self._alignments[f"{kind} {name}"] = align

    def _compound(self, kind: str, name: str | None, body: str) -> tuple[Type, int]:
        """Return a type and its alignment."""
        members, end, align, bit = [], 0, 1, 0
        for member in self._members(body):
            size, unit, bits = member.size, member.align, member.bits
            align = max(align, unit)
            if bits is not None and bit and bit % (8 * unit) + bits <= 8 * unit and bit // 8 < end:
                at = bit  # the field fits into the integer of the one before
            else:
                at = 0 if kind == "union" else -(-end // unit) * unit * 8
            bit = 0 if bits is None else at + bits
            end = max(end, at // 8 // unit * unit + size)
            members.append(TypeMember(member.find, member.name, at))
        make = self.prog.struct_type if kind == "struct" else self.prog.union_type
        return make(name, -(-end // align) * align, members), align

    def _members(self, body: str) -> Iterator[_Member]:
        for declaration, inner in _split(body):
            if inner is not None:
                compound, align = self._compound(declaration, None, inner)
                yield _Member(None, sizeof(compound), align, partial(_same, compound))
                continue
            found = _DECLARATION.match(declaration)
            assert found is not None, declaration
            name, stars = " ".join(found["type"].split()), len(found["stars"])
            lengths = [int(length) for length in re.findall(r"\d+", found["arrays"])]
            find = partial(self._type, name, stars, lengths)
            unit = 8 if stars else self._align(name)
            size = prod(lengths) * (8 if stars else sizeof(self.prog.type(name)))
            bits = None if found["bits"] is None else int(found["bits"])
            if bits is not None:
                field = Object(self.prog, self.prog.type(name), bit_field_size=bits)
                yield _Member(found["name"], size, unit, partial(_same, field), bits)
            else:
                yield _Member(found["name"], size, unit, find)

    def _align(self, name: str) -> int:
        # alignof() of drgn makes all members, and one may point to a structure declared later.
        known = self._alignments.get(name)
        return alignof(self.prog.type(name)) if known is None else known

    def _type(self, name: str, stars: int, lengths: list[int]) -> Type:
        # Pointers may be to structures that are declared later, or never.
        try:
            type_ = self.prog.type(name)
        except LookupError:
            type_ = self.prog.struct_type(name.removeprefix("struct "), None, None)
        for _ in range(stars):
            type_ = self.prog.pointer_type(type_)
        for length in reversed(lengths):
            type_ = self.prog.array_type(type_, length)
        return type_

    def enum(self, name: str | None, **values: int) -> None:
        """Declare enumerators."""
        type_ = self.prog.enum_type(
            name,
            self.prog.type("unsigned int"),
            [TypeEnumerator(*pair) for pair in values.items()],
        )
        if name is not None:
            self._types[TypeKind.ENUM, name] = type_
        for enumerator, value in values.items():
            self._objects[enumerator] = Object(self.prog, type_, value)

    def variable(self, name: str, type_: str, address: int) -> None:
        """Declare a variable, e.g. of the type ``struct zswap_tree *[2]``."""
        plain, brackets, length = type_.partition("[")
        found: Type = self.prog.type(plain)
        if brackets:
            found = self.prog.array_type(found, int(length.rstrip("]")))
        self._objects[name] = Object(self.prog, found, address=address)

    def symbol_at(
        self,
        name: str,
        address: int,
        size: int = 8,
        binding: SymbolBinding = SymbolBinding.GLOBAL,
    ) -> None:
        """Declare a symbol."""
        self._symbols[name] = Symbol(name, address, size, binding, SymbolKind.OBJECT)

    def write(self, address: int, data: bytes) -> None:
        """Fill memory. What is beside it in its pages, and was not filled, is 0."""
        for i, byte in enumerate(data):
            number, at = divmod(address + i, _PAGE)
            self._pages.setdefault(number, bytearray(_PAGE))[at] = byte

    def forget(self, address: int) -> None:
        """Leave out the page with an address, as if it were not in the dump."""
        del self._pages[address // _PAGE]

    def words(self, address: int, *values: int) -> None:
        """Fill words of 64 bits."""
        self.write(address, b"".join(value.to_bytes(8, "little") for value in values))

    def make(self, type_: str, address: int, members: Mapping[str, int]) -> None:
        """Make a structure at an address. Members that are not given are 0."""
        found = self.prog.type(type_)
        self.write(address, bytes(sizeof(found)))
        for name, value in members.items():
            place = Object(self.prog, found, address=address)
            for part in name.split("."):
                place = place.member_(part)
            at = address + offsetof(found, name) if place.bit_field_size_ is None else None
            if at is not None:
                self.write(at, value.to_bytes(sizeof(place), "little"))
            else:
                self._set_bits(place, value)

    def _set_bits(self, field: Object, value: int) -> None:
        start, shift = int(field.address_ or 0), int(field.bit_offset_ or 0)
        size = (shift + int(field.bit_field_size_ or 0) + 7) // 8
        word = int.from_bytes(self._read_memory(start, size, 0, False), "little")
        self.write(start, (word | value << shift).to_bytes(size, "little"))


_KINDS = {"struct": TypeKind.STRUCT, "union": TypeKind.UNION}


def _definitions(text: str) -> Iterator[tuple[str, str, str]]:
    rest = text
    while rest.strip():
        found = re.match(r"\s*(struct|union)\s+(\w+)\s*\{", rest)
        assert found is not None, rest
        end = _closing(rest, found.end())
        yield found[1], found[2], rest[found.end() : end]
        rest = rest[end + 1 :].lstrip().removeprefix(";")


def _split(body: str) -> Iterator[tuple[str, str | None]]:
    """Return the declarations of members; of anonymous ones the kind and what they contain."""
    rest = body.strip()
    while rest:
        found = re.match(r"(struct|union)\s*\{", rest)
        if found is None:
            declaration, _, rest = rest.partition(";")
            yield declaration.strip(), None
        else:
            end = _closing(rest, found.end())
            yield found[1], rest[found.end() : end]
            rest = rest[end + 1 :].lstrip().removeprefix(";")
        rest = rest.strip()


def _closing(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return at
    raise AssertionError(f"no end of {text[:start]}")
