# SPDX-License-Identifier: LGPL-2.1-or-later
"""
drgn plugin
-----------

drgn calls :func:`drgn_prog_set` when it has opened an image, before it loads debug info.

For a Linux kernel, the plugin registers a type finder, an object finder and a symbol finder, each
named ``btf``, behind all others, and one entry in ``prog.cache``. It does nothing else and reads
no memory. The finders read BTF when something is looked up that no other finder has found. They
find nothing if drgn has debug info for the kernel.
"""

from __future__ import annotations

from drgn import Program, ProgramFlags

__all__ = ("drgn_prog_set",)


def drgn_prog_set(prog: Program) -> None:
    """Register BTF as a source of types, objects and symbols of a Linux kernel."""
    if prog.flags & ProgramFlags.IS_LINUX_KERNEL:
        from memcg_inspect.btf.session import Session, start

        session = Session(prog)
        session.be_lenient()
        start(session)
