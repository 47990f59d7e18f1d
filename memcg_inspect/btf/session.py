# SPDX-License-Identifier: LGPL-2.1-or-later
"""
BTF as a source of types, objects and symbols
---------------------------------------------

A :class:`Session` finds types, objects and symbols of one program. ``prog.cache`` holds it, and the
finders registered with drgn look it up there, so that the finders do not keep the program alive.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from drgn import (
    FindObjectFlags,
    ModuleFileStatus,
    Object,
    Program,
    ProgramFlags,
    Symbol,
    SymbolIndex,
    Type,
    TypeKindSet,
    sizeof,
)

from memcg_inspect.btf import globals as table
from memcg_inspect.btf.main_module import make_main_module
from memcg_inspect.btf.modules import module_btfs, module_symbols
from memcg_inspect.btf.parse import Btf, BtfKind
from memcg_inspect.btf.source import Source, from_image
from memcg_inspect.btf.symbols import Symbols, SymbolTable, load_symbols
from memcg_inspect.btf.types import TypeMaker
from memcg_inspect.model import ImageError

__all__ = ("Session", "has_debug_info", "session_of", "start")

logger = logging.getLogger(__name__)

KEY = "memcg_inspect.btf"
FINDER = "btf"

#: No variable is larger, in bytes. A larger distance to the next symbol is taken to be damaged.
ROOM_LIMIT = 1 << 26


class _Place(NamedTuple):
    """Implementation of :class:`memcg_inspect.btf.globals.Variable`."""

    prog: Program
    address: int
    room: int | None


class Session:
    """
    Types, objects and symbols of one program, from BTF and kallsyms.

    Everything is read when it is first looked up.

    :param source: BTF of the kernel; by default it is read from the image
    """

    def __init__(self, prog: Program, source: Source | None = None) -> None:
        self.prog = prog
        self._source = source
        self._symbols: Symbols | None = None
        self._makers: list[TypeMaker] = []
        self._has_modules = False
        self._module_symbols: SymbolIndex | None = None
        self._types: dict[tuple[str, TypeKindSet], Type | None] = {}
        self._objects: dict[tuple[str, FindObjectFlags], Object | None] = {}
        self._is_busy = False
        self._is_lenient = False
        self._has_failed = False

    # Sources

    @property
    def source(self) -> Source:
        """
        Return the BTF of the kernel.

        :raises ImageError: if there is no BTF
        """
        if self._source is None:
            self._source = from_image(self.prog, self.symbols)
        return self._source

    @property
    def symbols(self) -> Symbols:
        """
        Return the symbols of the kernel.

        :raises ImageError: if they cannot be read
        """
        if self._symbols is None:
            is_kernel = self.prog.flags & ProgramFlags.IS_LINUX_KERNEL
            nothing = SymbolTable(self.prog, SymbolIndex([]))
            self._symbols = load_symbols(self.prog) if is_kernel else nothing
        return self._symbols

    @property
    def kernel(self) -> TypeMaker:
        """
        Return the converter of the kernel's types.

        :raises ImageError: if there is no BTF, or it is damaged
        """
        if not self._makers:
            # Reading BTF needs objects of drgn, and drgn asks this session for their types.
            self._is_busy = True
            try:
                btf = Btf(self.source.data, name=self.source.name)
                if btf.end <= 1:
                    raise btf.error("has no types")
                if not has_debug_info(self.prog):
                    # BTF from a file needs no symbols.
                    with suppress(ImageError):
                        make_main_module(self.prog, self.symbols)
            finally:
                self._is_busy = False
            self._makers.append(TypeMaker(self.prog, btf))
        return self._makers[0]

    def _all(self) -> Iterator[TypeMaker]:
        """Walk the converters: the kernel's, then those of modules, which are read on demand."""
        yield self.kernel
        if not self._has_modules:
            # Set first, since finding modules looks up types.
            self._has_modules = True
            # Modules cannot be found without symbols.
            with suppress(ImageError):
                for btf in module_btfs(self.prog, self.kernel.btf):
                    self._makers.append(TypeMaker(self.prog, btf, self.kernel))
        yield from self._makers[1:]

    def be_lenient(self) -> None:
        """If BTF cannot be read, log that once and find nothing, instead of raising an error."""
        self._is_lenient = True

    def is_silent(self) -> bool:
        """Return whether nothing is to be found: there is debug info, or BTF cannot be read."""
        if self._is_busy or self._has_failed or has_debug_info(self.prog):
            return True
        if self._is_lenient and not self._makers:
            try:
                self.kernel  # noqa: B018  (reads it, and raises)
            except ImageError as error:
                self._has_failed = True
                logger.warning("%s", error)
        return self._has_failed

    # Lookups

    def type(self, kinds: TypeKindSet, name: str) -> Type | None:
        """Return the type with a name and one of *kinds*; ``None`` if there is none."""
        key = name, kinds
        if key not in self._types:
            found = (maker.find(kinds, name) for maker in self._all())
            self._types[key] = next(filter(None, found), None)
        return self._types[key]

    def object(self, name: str, flags: FindObjectFlags) -> Object | None:
        """Return the enumerator, variable or function with a name; ``None`` if there is none."""
        key = name, flags
        if key not in self._objects:
            found = None
            if flags & FindObjectFlags.CONSTANT:
                found = self._enumerator(name)
            if found is None and flags & FindObjectFlags.VARIABLE:
                found = self._variable(name)
            if found is None and flags & FindObjectFlags.FUNCTION:
                found = self._function(name)
            self._objects[key] = found
        return self._objects[key]

    def _enumerator(self, name: str) -> Object | None:
        for maker in self._all():
            number = maker.btf.enumerator(name)
            if number is not None:
                value = dict(maker.btf.enumerators(number)).get(name)
                return Object(self.prog, maker.type(number), value=value)
        return None

    def _function(self, name: str) -> Object | None:
        for maker in self._all():
            for number in maker.btf.find(name, BtfKind.FUNC):
                symbols = self.find_symbols(name)
                if symbols:
                    return Object(self.prog, maker.type(number), address=symbols[0].address)
        return None

    def _variable(self, name: str) -> Object | None:
        for maker in self._all():
            for number in maker.btf.find(name, BtfKind.VAR):
                address = self._address(maker, number, name)
                if address is not None:
                    return self._described(maker, number, address)
        if name not in table.VARIABLES:
            return None
        for symbol in self.symbols.named(name):
            room = self.symbols.room(symbol)
            if room is not None and not 0 < room <= ROOM_LIMIT:
                room = None
            place = _Place(self.prog, symbol.address, room)
            type_ = table.type_of(name, place)
            if type_ is not None:
                return Object(self.prog, type_, address=symbol.address)
        return None

    def _described(self, maker: TypeMaker, number: int, address: int) -> Object:
        type_, section = maker.type(number), maker.btf.section(number)
        if section is not None and section.size < sizeof(type_):
            raise maker.btf.error(f"is damaged: variable {number} is smaller than its type")
        return Object(self.prog, type_, address=address)

    def _address(self, maker: TypeMaker, number: int, name: str) -> int | None:
        section = maker.btf.section(number)
        if section is not None and section.name == ".data..percpu" and maker is self.kernel:
            # This is right even if several static variables have the same name.
            start = self.symbols.named("__per_cpu_start")
            if start:
                return int(start[0].address) + section.offset
        symbols = self.find_symbols(name)
        return int(symbols[0].address) if symbols else None

    def find_symbols(self, name: str | None = None, address: int | None = None) -> list[Symbol]:
        """Return the symbols with a name, at an address, or both; without either, all."""
        if name is not None:
            found = self.symbols.named(name)
        elif address is not None:
            found = self.symbols.containing(address)
        else:
            found = self.symbols.everything()
        if not found or (name is None and address is None):
            if self._module_symbols is None:
                # Set first, since finding modules looks up symbols.
                self._module_symbols = SymbolIndex([])
                self._module_symbols = module_symbols(self.prog)
            found += self._module_symbols(self.prog, name, address, False)
        if name is None or address is None:
            return found
        return [s for s in found if s.address <= address < s.address + max(s.size, 1)]


def has_debug_info(prog: Program) -> bool:
    """Return whether drgn has debug info for the kernel."""
    try:
        return bool(prog.main_module().debug_file_status == ModuleFileStatus.HAVE)
    except LookupError:
        return False


def session_of(prog: Program) -> Session | None:
    """Return the session of a program; ``None`` if it has none."""
    return cast("Session | None", prog.cache.get(KEY))


def start(session: Session) -> None:
    """Register a session for its program, with finders that come after all others."""
    prog = session.prog
    prog.cache[KEY] = session
    if FINDER not in prog.registered_type_finders():
        prog.register_type_finder(FINDER, _find_type, enable_index=-1)
        prog.register_object_finder(FINDER, _find_object, enable_index=-1)
        prog.register_symbol_finder(FINDER, _find_symbols, enable_index=-1)


def _find_type(prog: Program, kinds: TypeKindSet, name: str, filename: str | None) -> Type | None:
    session = session_of(prog)
    if session is None or session.is_silent():
        return None
    return session.type(kinds, name)


def _find_object(
    prog: Program, name: str, flags: FindObjectFlags, filename: str | None
) -> Object | None:
    session = session_of(prog)
    if session is None or session.is_silent():
        return None
    return session.object(name, flags)


def _find_symbols(
    prog: Program, name: str | None, address: int | None, one: bool
) -> Sequence[Symbol]:
    session = session_of(prog)
    if session is None or session.is_silent():
        return ()
    found = session.find_symbols(name, address)
    return found[:1] if one else found
