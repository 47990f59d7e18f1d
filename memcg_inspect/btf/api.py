# SPDX-License-Identifier: LGPL-2.1-or-later
"""What sessions and other programs call."""

from __future__ import annotations

from drgn import Program

from memcg_inspect.btf.session import Session, has_debug_info, session_of, start
from memcg_inspect.btf.source import from_file

__all__ = ("debug_info_source", "load_btf")


def load_btf(prog: Program, path: str | None = None) -> None:
    """
    Make a program take types, enumerators, variables and symbols from BTF and kallsyms where
    it has no debug info for the kernel.

    :param prog: a program that looks at a Linux kernel
    :param path: file with the kernel's BTF: BTF itself, or an ELF file with a section
        ``.BTF``; without it, the image's own is used, or ``/sys/kernel/btf`` of the running
        kernel
    :raises ImageError: if there is no BTF, or it is damaged; one line says what is missing and
        where debug info is to be had
    """
    session = session_of(prog)
    if session is None or path is not None:  # else the plugin's, which may have read it all
        session = Session(prog, None if path is None else from_file(path))
    session.kernel  # noqa: B018  (reads it, and raises)
    start(session)


def debug_info_source(prog: Program) -> str:
    """
    Return where a program's types come from, in words.

    :return: e.g. ``DWARF: /usr/lib/debug/boot/vmlinux-6.1.0``, ``BTF of the image``, ``none``
    """
    if has_debug_info(prog):
        path = prog.main_module().debug_file_path
        return f"DWARF: {path}" if path else "DWARF"
    session = session_of(prog)
    if session is None or session.is_silent():
        return "none"
    return session.source.name
