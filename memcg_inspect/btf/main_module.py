# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The module of the kernel itself
-------------------------------

drgn makes this module when it loads debug info. Without it, drgn unwinds no stack: the module tells
it which addresses the kernel's ORC tables are for. The modules that the kernel has loaded are left
unknown, since drgn follows their list without a bound.
"""

from __future__ import annotations

import re
from contextlib import suppress

from drgn import Program

from memcg_inspect.btf.symbols import Symbols

__all__ = ("make_main_module",)

#: Where the kernel ends: arch/x86/kernel/vmlinux.lds.S has a section behind ``_end`` since 5.3.
#: If debug info is loaded later, drgn keeps the range, which has to be that of the file.
_ENDS = ("_end", "__init_scratch_end")


def make_main_module(prog: Program, symbols: Symbols) -> None:
    """
    Make drgn's module of the kernel, with what drgn would know of it.

    This has no effect if the addresses of the kernel are not known.

    :param prog: Program that debugs a Linux kernel.
    :param symbols: symbols of that kernel
    """
    start = symbols.named("_stext")
    ends = [symbol.address for name in _ENDS for symbol in symbols.named(name)]
    if not start or not ends:
        return
    with suppress(LookupError, ValueError):
        main = prog.main_module("kernel", create=True)
        if not main.address_ranges:
            main.address_ranges = [(start[0].address, max(ends))]
        if main.build_id is None:  # drgn reads it only if it makes the module
            main.build_id = _build_id(prog)


def _build_id(prog: Program) -> bytes | None:
    """Return the build ID of the kernel in VMCOREINFO (since 5.9); ``None`` if there is none."""
    found = re.search(rb"^BUILD-ID=((?:[0-9a-f]{2})+)$", prog["VMCOREINFO"].string_(), re.M)
    return bytes.fromhex(found[1].decode()) if found else None
