# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A program whose memory and types a test makes by hand.

Addresses below :data:`BASE`, and those behind the end of the memory, fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drgn import (
    Architecture,
    FindObjectFlags,
    Object,
    Platform,
    Program,
    Symbol,
    SymbolBinding,
    SymbolKind,
    Type,
    TypeKindSet,
    TypeMember,
    sizeof,
)

from memcg_inspect.image.image import Image

BASE = 0xFFFF888000000000
SIZE = 1 << 20

#: Name and type of each member; an empty name for none. A function makes the type of a pointer
#: when it is needed: the structure may point to itself.
Members = Sequence[tuple[str, Type | Callable[[], Type]]]


class MadeMemory:
    """
    A program with made memory.

    :param platform: that of the machine; x86-64 if it is not given
    :ivar prog: the program
    :ivar image: its image
    :ivar reads: number of reads so far
    """

    def __init__(self, platform: Platform | None = None) -> None:
        self.prog = Program(platform or Platform(Architecture.X86_64))
        self._data = bytearray(SIZE)
        self._types: dict[str, Type] = {}
        self._objects: dict[str, Object] = {}
        self._symbols: dict[str, Symbol] = {}
        self.reads = 0
        self.prog.add_memory_segment(BASE, SIZE, self._read, False)
        self.prog.register_type_finder("made", self._find_type, enable_index=0)
        self.prog.register_object_finder("made", self._find_object, enable_index=0)
        self.prog.register_symbol_finder("made", self._find_symbols, enable_index=0)
        self.image = Image(self.prog)
        self.word = self.prog.int_type("unsigned long", 8, False)
        self.int = self.prog.int_type("int", 4, True)
        self.char = self.prog.int_type("char", 1, True)

    def _read(self, address: int, count: int, offset: int, physical: bool) -> bytes:
        self.reads += 1
        return bytes(self._data[offset : offset + count])

    def _find_type(
        self, prog: Program, kinds: TypeKindSet, name: str, filename: str | None
    ) -> Type | None:
        found = self._types.get(name)
        return found if found is not None and found.kind in kinds else None

    def _find_object(
        self, prog: Program, name: str, flags: FindObjectFlags, filename: str | None
    ) -> Object | None:
        return self._objects.get(name)

    def _find_symbols(
        self, prog: Program, name: str | None, address: int | None, one: bool
    ) -> list[Symbol]:
        found = [
            symbol
            for symbol in self._symbols.values()
            if name in (None, symbol.name)
            and (address is None or 0 <= address - symbol.address < symbol.size)
        ]
        return found[:1] if one else found

    def pointer(self, to: Type | str) -> Type:
        """Return the type of a pointer, also to a structure of a name."""
        return self.prog.pointer_type(self.prog.type(f"struct {to}") if isinstance(to, str) else to)

    def link(self, to: str) -> Callable[[], Type]:
        """Return the type of a pointer to a structure that is made later."""
        return lambda: self.pointer(to)

    def array(self, of: Type, length: int) -> Type:
        """Return the type of an array."""
        return self.prog.array_type(of, length)

    def struct(self, name: str | None, members: Members, *, union: bool = False) -> Type:
        """Make a structure or a union. One with a name can be looked up."""
        made, end = [], 0
        for member, type_ in members:
            size = sizeof(type_) if isinstance(type_, Type) else 8
            align = size if size in (1, 2, 4) else 8
            at = 0 if union else -(-end // align) * align
            made.append(TypeMember(type_, member or None, 8 * at))
            end = max(end, at + size)
        make = self.prog.union_type if union else self.prog.struct_type
        found = make(name, end, made)
        if name is not None:
            self._types[name] = found
        return found

    def typedef(self, name: str, type_: Type) -> Type:
        """Make a typedef."""
        found = self._types[name] = self.prog.typedef_type(name, type_)
        return found

    def variable(self, name: str, type_: Type, address: int) -> Object:
        """Make a global variable."""
        found = self._objects[name] = Object(self.prog, type_, address=address)
        return found

    def symbol(self, name: str, address: int, size: int) -> None:
        """Make a symbol."""
        self._symbols[name] = Symbol(name, address, size, SymbolBinding.GLOBAL, SymbolKind.OBJECT)

    def constant(self, name: str, value: int) -> None:
        """Make a constant, as enumerators are."""
        self._objects[name] = Object(self.prog, self.int, value=value)

    def write(self, address: int, value: int | bytes, size: int = 8) -> None:
        """Write a number or bytes."""
        data = value if isinstance(value, bytes) else value.to_bytes(size, "little")
        self._data[address - BASE : address - BASE + len(data)] = data

    def at(self, type_: Type, address: int) -> Object:
        """Return a pointer to what is at an address."""
        return Object(self.prog, self.pointer(type_), address)
