# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Symbols from kallsyms
---------------------

Mirrors :linux:`kernel/kallsyms.c` and the tables that :linux:`scripts/kallsyms.c` writes.

drgn's ``load_vmlinux_kallsyms()`` unpacks all symbols, which takes half a second for 200,000.
This module finds a name by bisection in ``kallsyms_seqs_of_names`` and unpacks about 20 symbols.
Kernels before 6.2 have no such table: there the last two tokens of the name select the symbols to
unpack. The tables are checked with the address of ``_stext`` from VMCOREINFO. If they cannot be
read, drgn's helper is used.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol

from drgn import FaultError, PlatformFlags, Program, Symbol, SymbolBinding, SymbolKind
from drgn.helpers.linux.kallsyms import load_vmlinux_kallsyms

from memcg_inspect.model import ImageError

__all__ = ("Kallsyms", "SymbolTable", "Symbols", "load_symbols")

#: ``kallsyms_markers`` has one entry for this many symbols.
GROUP = 256
#: The most bytes of ``kallsyms_names``.
NAMES_LIMIT = 64 << 20
#: kallsyms has no sizes. A symbol ends at the next one, unless that is farther away than this.
SIZE_LIMIT = 0x10000


class Symbols(Protocol):
    """Interface of :class:`Kallsyms` and :class:`SymbolTable`."""

    def named(self, name: str) -> list[Symbol]:
        """Return all symbols of a name."""

    def containing(self, address: int) -> list[Symbol]:
        """Return all symbols that an address lies in."""

    def room(self, symbol: Symbol) -> int | None:
        """Return the distance to the next symbol, if known."""

    def everything(self) -> list[Symbol]:
        """Return all symbols."""


class SymbolTable:
    """Symbols of a symbol finder of drgn, e.g. a :class:`drgn.SymbolIndex`."""

    def __init__(
        self,
        prog: Program,
        find: Callable[[Program, str | None, int | None, bool], Sequence[Symbol]],
    ) -> None:
        self._prog = prog
        self._index = find

    def _find(self, name: str | None, address: int | None) -> list[Symbol]:
        return list(self._index(self._prog, name, address, False))

    def named(self, name: str) -> list[Symbol]:
        """Return all symbols of a name."""
        return self._find(name, None)

    def containing(self, address: int) -> list[Symbol]:
        """Return all symbols that an address lies in."""
        return self._find(None, address)

    def room(self, symbol: Symbol) -> int | None:
        """Return the distance to the next symbol, if known."""
        return symbol.size or None

    def everything(self) -> list[Symbol]:
        """Return all symbols."""
        return self._find(None, None)


class Kallsyms:
    """
    Symbols of a kernel, from its kallsyms tables.

    :raises LookupError: if VMCOREINFO lacks the addresses of the tables, or their format is unknown
    :raises drgn.FaultError: if the tables cannot be read
    """

    def __init__(self, prog: Program) -> None:
        if prog.platform is None:
            raise LookupError("the program has no platform")
        self._prog = prog
        flags = prog.platform.flags
        self._order: Literal["little", "big"] = (
            "little" if flags & PlatformFlags.IS_LITTLE_ENDIAN else "big"
        )
        self._word_size = 8 if flags & PlatformFlags.IS_64_BIT else 4
        vmcoreinfo = _vmcoreinfo_symbols(prog)
        names, tokens = vmcoreinfo["kallsyms_names"], vmcoreinfo["kallsyms_token_table"]
        self.count = self._ints(vmcoreinfo["kallsyms_num_syms"], 1, "I")[0]
        if not 0 < tokens - names < NAMES_LIMIT or not 0 < self.count < tokens - names:
            raise LookupError("the tables of kallsyms are not in the expected order")
        self._names = self._prog.read(names, tokens - names)
        self._tokens = self._read_tokens(tokens, vmcoreinfo["kallsyms_token_index"])
        self._markers = self._find_markers()
        self._indexes: Callable[[bytes], list[int]] = lambda name: []
        self._addresses = self._find_addresses(vmcoreinfo)

    def _ints(self, address: int, count: int, code: str) -> tuple[int, ...]:
        data = self._prog.read(address, count * struct.calcsize(f"={code}"))
        return struct.unpack(f"{'<' if self._order == 'little' else '>'}{count}{code}", data)

    def _read_tokens(self, table: int, index: int) -> list[bytes]:
        starts = self._ints(index, 256, "H")
        # The table is followed by its index.
        size = max(starts) + 128 if not 0 < index - table <= 1 << 16 else index - table
        data = self._prog.read(table, size)
        return [data[start : data.find(b"\0", start)] for start in starts]

    # Names

    def _find_markers(self) -> list[int]:
        """Return the offset of every 256th name. ``kallsyms_markers`` lies before the tokens."""
        groups = -(-self.count // GROUP)
        size = 4 * groups
        order = "<" if self._order == "little" else ">"
        for start in range((len(self._names) - size) & ~3, len(self._names) - size - 16, -4):
            if start <= 0:
                break
            markers = list(struct.unpack_from(f"{order}{groups}I", self._names, start))
            if markers[0] == 0 and all(
                self._skip(markers[i], GROUP) == markers[i + 1]
                for i in {0, groups // 2, groups - 2}
                if 0 <= i < groups - 1
            ):
                return markers
        markers, at = [], 0
        for _ in range(groups):
            markers.append(at)
            at = self._skip(at, GROUP)
        return markers

    def _skip(self, at: int, count: int) -> int:
        names, end = self._names, len(self._names)
        for _ in range(count):
            if at >= end - 1:
                return end
            length = names[at]
            # Lengths may have two bytes since commit 73bbb94466fd ("kallsyms: support "big" kernel
            # symbols") (in v6.1). Names were shorter before.
            at += 1 + length if length < 0x80 else 2 + (length & 0x7F | names[at + 1] << 7)
        return at

    def _raw(self, index: int) -> bytes:
        """Return the type letter of :manpage:`nm(1)`, followed by the name of a symbol."""
        at = self._skip(self._markers[index // GROUP], index % GROUP)
        if at >= len(self._names) - 1:
            return b""
        end, start = self._skip(at, 1), at + 1 + (self._names[at] >> 7)
        return b"".join([self._tokens[byte] for byte in self._names[start:end]])

    def _unpack(self) -> list[bytes]:
        """Return the type letters and names of all symbols, as :meth:`_raw`."""
        names, token, at, found = self._names, self._tokens.__getitem__, 0, []
        for _ in range(self.count):
            length = names[at] if at < len(names) - 1 else 0
            at += 1
            if length >= 0x80:
                length = length & 0x7F | names[at] << 7
                at += 1
            found.append(b"".join(map(token, names[at : at + length])))
            at += length
        return found

    def _by_name(self, index: int) -> bytes:
        return self._raw(index)[1:]

    # Addresses

    def _find_addresses(self, vmcoreinfo: dict[str, int]) -> Callable[[int], int]:
        stext = vmcoreinfo["_stext"]
        for indexes in self._name_lookups(vmcoreinfo):
            self._indexes = indexes
            for index in indexes(b"_stext"):
                for address in self._encodings(vmcoreinfo):
                    if address(index) == stext:
                        return address
        raise LookupError("the format of the addresses of kallsyms is unknown")

    def _name_lookups(self, vmcoreinfo: dict[str, int]) -> Iterable[Callable[[bytes], list[int]]]:
        """Return functions that find symbols by name: by ``kallsyms_seqs_of_names``, by tokens."""
        if "kallsyms_offsets" in vmcoreinfo:
            # Since 6.5 kallsyms_seqs_of_names is the last table.
            after = vmcoreinfo["kallsyms_offsets"] + 4 * self.count
            if "kallsyms_relative_base" in vmcoreinfo:
                after = vmcoreinfo["kallsyms_relative_base"] + self._word_size
            for start in {after, -(-after // 8) * 8}:
                with suppress(FaultError):
                    order = _Triples(self._prog.read(start, 3 * self.count), self.count)
                    yield partial(self._in_order, order)
        yield _Ends(self._names, self._tokens, self.count).indexes

    def _encodings(self, vmcoreinfo: dict[str, int]) -> Iterable[Callable[[int], int]]:
        """Return functions that return the address of a symbol, by its index."""
        if "kallsyms_addresses" in vmcoreinfo:
            code = "Q" if self._word_size == 8 else "I"
            yield self._ints(vmcoreinfo["kallsyms_addresses"], self.count, code).__getitem__
            return
        place, mask = vmcoreinfo["kallsyms_offsets"], (1 << 8 * self._word_size) - 1
        offsets = self._ints(place, self.count, "i")
        if "kallsyms_relative_base" in vmcoreinfo:
            code = "Q" if self._word_size == 8 else "I"
            base = self._ints(vmcoreinfo["kallsyms_relative_base"], 1, code)[0]
            # CONFIG_KALLSYMS_ABSOLUTE_PERCPU, until commit 01157ddc58dc ("kallsyms: Remove
            # KALLSYMS_ABSOLUTE_PERCPU") (in v6.15).
            yield lambda i: base - 1 - offsets[i] & mask if offsets[i] < 0 else offsets[i]
            yield lambda i: base + (offsets[i] & 0xFFFFFFFF) & mask
        # Commit a081b5789255 ("kallsyms: Get rid of kallsyms relative base") (in v7.0).
        yield lambda i: place + 4 * i + offsets[i] & mask
        yield lambda i: offsets[i] & mask

    # Lookups

    def _in_order(self, order: Sequence[int], wanted: bytes) -> list[int]:
        first = bisect_left(order, wanted, key=self._by_name)
        last = first
        while last < self.count and self._by_name(order[last]) == wanted:
            last += 1
        return [order[i] for i in range(first, last)]

    def _symbol(self, index: int, raw: bytes | None = None) -> Symbol:
        raw = self._raw(index) if raw is None else raw
        address, size = self._addresses(index), 0
        if index + 1 < self.count:
            size = self._addresses(index + 1) - address
        return Symbol(
            raw[1:].decode(errors="backslashreplace"),
            address,
            size if 0 <= size < SIZE_LIMIT else 0,
            _binding(raw[:1]),
            _kind(raw[:1]),
        )

    def named(self, name: str) -> list[Symbol]:
        """Return all symbols of a name."""
        wanted = name.encode(errors="surrogateescape")
        return [self._symbol(index) for index in self._indexes(wanted)]

    def containing(self, address: int) -> list[Symbol]:
        """Return all symbols that an address lies in."""
        index = bisect_right(range(self.count), address, key=self._addresses) - 1
        if index < 0:
            return []
        symbol = self._symbol(index)
        return [symbol] if address - symbol.address < symbol.size else []

    def room(self, symbol: Symbol) -> int | None:
        """Return the distance to the next symbol, if known."""
        index = bisect_right(range(self.count), symbol.address, key=self._addresses)
        return self._addresses(index) - symbol.address if index < self.count else None

    def everything(self) -> list[Symbol]:
        """Return all symbols."""
        return [self._symbol(index, raw) for index, raw in enumerate(self._unpack())]


class _Ends:
    """
    Finds symbols by the last two tokens of their names, for kernels before 6.2.

    Only symbols with these two tokens are unpacked.
    """

    def __init__(self, names: bytes, tokens: list[bytes], count: int) -> None:
        self._names, self._tokens = names, tokens
        starts, ends, at = array("I"), array("I"), 0
        begin, end = starts.append, ends.append
        limit = len(names) - 1
        for _ in range(count):
            if at >= limit:
                break
            length = names[at]
            at += 1
            if length >= 0x80:
                length = length & 0x7F | names[at] << 7
                at += 1
            begin(at)
            at += length
            end(at)
        self._starts, self._ends = starts, ends
        # The tail of a truncated name, or of a name of one token, may match another name by
        # mistake. _is() compares the whole name.
        last = names.ljust(at, b"\0").__getitem__
        tails = bytearray(2 * len(ends))
        tails[::2] = bytes([last(at - 2) for at in ends])
        tails[1::2] = bytes([last(at - 1) for at in ends])
        self._tails = bytes(tails)
        self._codes: defaultdict[bytes, list[int]] = defaultdict(list)
        for code, token in enumerate(tokens):
            self._codes[token].append(code)

    def indexes(self, wanted: bytes) -> list[int]:
        """Return the indexes of all symbols of a name, lowest first."""
        found = []
        for tail in set(self._ways_to_end(wanted)):
            at = self._tails.find(tail)
            while at >= 0:
                # An odd offset is the end of one tail and the beginning of the next.
                if at % 2 == 0 and self._is(at // 2, wanted):
                    found.append(at // 2)
                at = self._tails.find(tail, at + 1)
        return sorted(found)

    def _ways_to_end(self, wanted: bytes) -> Iterator[bytes]:
        """Return the last two bytes of names: two tokens, or a length and a token."""
        for code, token in enumerate(self._tokens):
            if token[1:] == wanted:  # one token: the type letter and the whole name
                yield bytes([1, code])
            if not token or not wanted.endswith(token):
                continue
            rest = wanted[: len(wanted) - len(token)]
            for start in range(len(rest)):
                for before in self._codes.get(rest[start:], ()):
                    yield bytes([before, code])
            for before, whole in enumerate(self._tokens):
                if whole[1:] == rest and whole:
                    yield bytes([before, code])

    def _is(self, index: int, wanted: bytes) -> bool:
        first, *rest = self._names[self._starts[index] : self._ends[index]] or b"\0"
        # Compare the first token before the others are unpacked.
        begin = self._tokens[first][1:]
        return wanted.startswith(begin) and wanted == b"".join(
            [begin, *[self._tokens[byte] for byte in rest]]
        )


class _Triples(Sequence[int]):
    """Big-endian numbers of three bytes each, as in ``kallsyms_seqs_of_names``."""

    def __init__(self, data: bytes, count: int) -> None:
        self._data = data
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        number = int.from_bytes(self._data[3 * index : 3 * index + 3], "big")
        return number if number < self._count else 0


def _vmcoreinfo_symbols(prog: Program) -> dict[str, int]:
    text = prog["VMCOREINFO"].string_().decode(errors="replace")
    found = re.findall(r"^SYMBOL\((\w+)\)=([0-9A-Fa-f]+)$", text, re.MULTILINE)
    return {name: int(address, 16) for name, address in found}


def _binding(letter: bytes) -> SymbolBinding:
    if letter in b"vVwW":
        return SymbolBinding.WEAK
    if letter == b"u":
        return SymbolBinding.UNIQUE
    return SymbolBinding.GLOBAL if letter.isupper() else SymbolBinding.UNKNOWN


def _kind(letter: bytes) -> SymbolKind:
    if letter in b"tT":
        return SymbolKind.FUNC
    return SymbolKind.OBJECT if letter in b"bBcCdDgGrRvV" else SymbolKind.UNKNOWN


def load_symbols(prog: Program) -> Symbols:
    """
    Load the symbols of a kernel.

    :raises ImageError: if they cannot be read (Linux 6.0 with ``CONFIG_KALLSYMS`` is needed)
    """
    try:
        return Kallsyms(prog)
    except (LookupError, FaultError, ValueError):
        pass
    try:
        return SymbolTable(prog, load_vmlinux_kallsyms(prog))
    except Exception as error:  # drgn raises Exception for tables that it cannot parse
        reason = " ".join(str(error).split())
        raise ImageError(f"the kernel's symbols (kallsyms) cannot be read: {reason}") from None
