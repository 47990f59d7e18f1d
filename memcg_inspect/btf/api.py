# SPDX-License-Identifier: LGPL-2.1-or-later
"""Public functions of :mod:`memcg_inspect.btf`."""

from __future__ import annotations

from collections.abc import Callable

from drgn import Program

from memcg_inspect.btf.parse import BtfKind
from memcg_inspect.btf.session import Session, has_debug_info, session_of, start
from memcg_inspect.btf.source import from_file
from memcg_inspect.model import ImageError

__all__ = ("StructNames", "debug_info_source", "load_btf", "struct_names")

#: Returns the name of a structure by its id in the kernel's BTF; ``None`` if there is none.
StructNames = Callable[[int], "str | None"]


def load_btf(prog: Program, path: str | None = None) -> None:
    """
    Use BTF and kallsyms for types, enumerators, variables and symbols of a Linux kernel.

    This has no effect while the program has debug info for the kernel.

    :param prog: Program that debugs a Linux kernel.
    :param path: File with the BTF of the kernel: raw BTF, or an ELF file with a section ``.BTF``.
        By default BTF is read from the image, or from ``/sys/kernel/btf`` for the running kernel.
    :raises ImageError: if there is no BTF, or it is damaged
    """
    session = session_of(prog)
    if session is None or path is not None:  # the session of the plugin may have read BTF already
        session = Session(prog, None if path is None else from_file(path))
    session.kernel  # noqa: B018  (reads it, and raises)
    start(session)


def debug_info_source(prog: Program) -> str:
    """
    Return the source of a program's types.

    :return: for example ``DWARF: /usr/lib/debug/boot/vmlinux-6.1.0``, ``BTF of the image`` or
        ``none``
    """
    if has_debug_info(prog):
        path = prog.main_module().debug_file_path
        return f"DWARF: {path}" if path else "DWARF"
    session = session_of(prog)
    if session is None or session.is_silent():
        return "none"
    return session.source.name


def struct_names(prog: Program) -> StructNames:
    """
    Return a function that names structures by their ids in the kernel's BTF.

    BTF is read for this also while the program has debug info for the kernel.
    """
    session = session_of(prog) or Session(prog)

    def name_of(number: int) -> str | None:
        try:
            btf = session.kernel.btf
            if 0 < number < btf.end and btf.kind(number) == BtfKind.STRUCT:
                return btf.name_of(number) or None
        except ImageError:
            pass  # there is no BTF, or it is damaged
        return None

    return name_of
