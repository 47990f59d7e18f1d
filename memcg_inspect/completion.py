# SPDX-License-Identifier: LGPL-2.1-or-later
"""Completion of commands and options in shells, with the optional package argcomplete."""

from __future__ import annotations

import os
from contextlib import suppress

from memcg_inspect.arguments import Parser

__all__ = ("SHELLS", "complete", "completion_script")

#: The shells that there are completion scripts for.
SHELLS = ("bash", "zsh", "fish")

#: The scripts set it when they ask the program for completions.
_ASKED = "_ARGCOMPLETE"


def complete(parser: Parser) -> None:
    """Answer a shell that asks for completions and exit; else do nothing."""
    if _ASKED not in os.environ:
        return
    with suppress(ImportError):
        import argcomplete

        parser.fill_commands()
        argcomplete.autocomplete(parser)


def completion_script(shell: str) -> str:
    """
    Return the completion script of a shell.

    :param shell: one of :data:`SHELLS`
    :raises MemcgInspectError: if argcomplete is not installed
    """
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        from memcg_inspect.model import MemcgInspectError

        raise MemcgInspectError(
            "completion needs the Python package argcomplete: pip install argcomplete"
        ) from None
    script: str = shellcode(["memcg-inspect"], shell=shell)
    return script + "\n"
