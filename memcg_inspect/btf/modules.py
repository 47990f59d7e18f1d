# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Types and symbols of modules
----------------------------

Mirrors ``btf_modules`` of :linux:`kernel/bpf/btf.c` and ``struct mod_kallsyms`` of
:linux:`include/linux/module.h`. The kernel frees ``btf_data`` of a module after loading it, and
keeps a copy in a ``struct btf``.

A module that cannot be read is left out and logged.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator

from drgn import (
    FaultError,
    Object,
    PlatformFlags,
    Program,
    Symbol,
    SymbolBinding,
    SymbolIndex,
    SymbolKind,
    offsetof,
    sizeof,
)

from memcg_inspect.btf.parse import NAME_LIMIT, Btf, BtfError
from memcg_inspect.btf.source import LIMIT, SYS, from_file, is_running_kernel

__all__ = ("module_btfs", "module_symbols")

logger = logging.getLogger(__name__)

#: A longer list of modules is taken to be damaged.
MODULES_LIMIT = 1 << 14
#: A larger table of symbols is taken to be damaged.
SYMBOLS_LIMIT = 1 << 20


def module_btfs(prog: Program, base: Btf) -> Iterator[Btf]:
    """Walk the BTF of all loaded modules."""
    found = _from_sys() if is_running_kernel(prog) else _from_image(prog)
    for name, data in found:
        try:
            yield Btf(data, base, name)
        except BtfError as error:
            logger.info("%s", error)


def _from_sys() -> Iterator[tuple[str, bytes]]:
    try:
        names = sorted(os.listdir(SYS))
    except OSError:
        return
    for name in names:
        if name != "vmlinux":
            try:
                yield f"BTF of module {name}", from_file(f"{SYS}/{name}").data
            except BtfError as error:
                logger.info("%s", error)


def _from_image(prog: Program) -> Iterator[tuple[str, bytes]]:
    for entry in _entries(prog, "btf_modules", "struct btf_module"):
        try:
            btf = entry.btf[0]
            name = btf.name.string_().decode(errors="backslashreplace")
            size = int(btf.data_size)
            if size <= LIMIT:
                yield f"BTF of module {name}", prog.read(btf.data.value_(), size)
        except (FaultError, LookupError) as error:
            logger.info("BTF of a module: %s", error)


def _entries(prog: Program, name: str, type_name: str) -> Iterator[Object]:
    """Walk a global list of entries with a member ``struct list_head list``, as far as possible."""
    try:
        type_ = prog.type(type_name)
        head = prog[name].address_of_()
        entry, offset = head.next.read_(), offsetof(type_, "list")
    except (LookupError, FaultError):
        return
    seen = {head.value_()}
    while entry.value_() not in seen and len(seen) < MODULES_LIMIT:
        seen.add(entry.value_())
        yield Object(prog, prog.pointer_type(type_), entry.value_() - offset)
        try:
            entry = entry.next.read_()
        except FaultError as error:
            logger.info("%s: %s", name, error)
            return


def module_symbols(prog: Program) -> SymbolIndex:
    """Return the symbols of all loaded modules."""
    symbols: list[Symbol] = []
    for module in _entries(prog, "modules", "struct module"):
        try:
            symbols += _symbols(prog, module)
        except (FaultError, LookupError, ValueError, struct.error) as error:
            logger.info("symbols of a module: %s", error)
    return SymbolIndex(symbols)


def _symbols(prog: Program, module: Object) -> list[Symbol]:
    tables = module.kallsyms.read_()
    count = int(tables.num_symtab)
    if not 0 < count < SYMBOLS_LIMIT:
        return []
    # Elf64_Sym and Elf32_Sym have the same members in a different order.
    wide = sizeof(tables.symtab.type_.type) == 24
    is_little = prog.platform is not None and prog.platform.flags & PlatformFlags.IS_LITTLE_ENDIAN
    order = "<" if is_little else ">"
    form = struct.Struct(f"{order}IBBHQQ" if wide else f"{order}IIIBBH")
    table = list(form.iter_unpack(prog.read(tables.symtab.value_(), count * form.size)))
    strings = _strings(prog, tables.strtab.value_(), max(entry[0] for entry in table))
    symbols = []
    for entry in table:
        name, info, value, size = (
            (entry[0], entry[1], entry[4], entry[5])
            if wide
            else (entry[0], entry[3], entry[1], entry[2])
        )
        text = strings[name : strings.find(b"\0", name)]
        if text:
            symbols.append(
                Symbol(text.decode(errors="backslashreplace"), value, size, *_sort(info))
            )
    return symbols


def _strings(prog: Program, address: int, last: int) -> bytes:
    if last > LIMIT:
        raise ValueError("its string table is damaged")
    data: bytes = prog.read(address, last)
    name: bytes = prog.read_c_string(address + last, max_size=NAME_LIMIT)
    return data + name + b"\0"


def _sort(info: int) -> tuple[SymbolBinding, SymbolKind]:
    """Return the binding and the kind in ``st_info``."""
    binding, kind = info >> 4, info & 0xF
    return (
        SymbolBinding(binding + 1) if binding <= 2 else SymbolBinding.UNKNOWN,
        SymbolKind(kind) if kind <= 6 else SymbolKind.UNKNOWN,
    )
