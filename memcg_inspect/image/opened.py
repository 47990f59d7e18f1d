# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Programs that drgn opened
-------------------------

A session that was started by ``drgn -c`` reads a dump without what
:func:`~memcg_inspect.image.program.open_program` does for it.
"""

from __future__ import annotations

import shlex

from drgn import Program, ProgramFlags

from memcg_inspect.elf import MAGIC
from memcg_inspect.image.elf import is_protected, protect
from memcg_inspect.image.flattened import begins_with
from memcg_inspect.image.split import check_no_part
from memcg_inspect.model import ImageError

__all__ = ("prepare",)


def prepare(prog: Program) -> None:
    """
    Make memory fault that a dump does not have, if nothing else has done so.

    :raises ImageError: if the program cannot be prepared: it was opened from one part of a split
        dump, from a flattened ELF dump, or from a file that cannot be read any more
    """
    path = None if prog.flags & ProgramFlags.IS_LIVE else prog.core_dump_path
    # That of a copy without a name cannot be opened a second time.
    if path is None or is_protected(prog):
        return
    check_no_part(path)
    try:
        if begins_with(path, MAGIC):
            raise ImageError(
                f"{path} is a flattened ELF dump: drgn reads pages that were left out of it as "
                f"zeroes. Open it with memcg_inspect.open(), or unflatten it: makedumpfile -R "
                f"vmcore < {shlex.quote(path)}"
            )
        protect(prog, path)
    except OSError as error:
        raise ImageError(f"{path} cannot be read again: {error.strerror or error}") from None
