# SPDX-License-Identifier: LGPL-2.1-or-later
"""
drgn plugin
-----------

drgn calls :func:`drgn_prog_set` when it has opened a kernel, before it looks for debug info.
Nothing is read then: BTF is looked for when something is asked that no debug info answers.
"""

from __future__ import annotations

from drgn import Program, ProgramFlags

__all__ = ("drgn_prog_set",)


def drgn_prog_set(prog: Program) -> None:
    """Have BTF answer where there is no debug info."""
    if prog.flags & ProgramFlags.IS_LINUX_KERNEL:
        from memcg_inspect.btf.session import Session, start

        session = Session(prog)
        session.be_lenient()
        start(session)
