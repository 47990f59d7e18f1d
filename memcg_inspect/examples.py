# SPDX-License-Identifier: LGPL-2.1-or-later
"""The examples that ``--help`` of each command prints. A run wrote their output."""

from __future__ import annotations

from importlib.resources import files

__all__ = ("examples",)

_DOCUMENT = "examples.md"


def examples(command: str, prog: str) -> str:
    """
    Return the examples of a command, with their output.

    :param prog: how the program is called: ``memcg-inspect``, or ``%memcg`` in a drgn session
    """
    text = (files("memcg_inspect") / _DOCUMENT).read_text(encoding="utf-8")
    _, begins, rest = text.partition(f"<!-- begin help_{command}:")
    if not begins:
        return ""
    body = rest.split("```text\n")[1].split("\n```")[0]
    if prog != "memcg-inspect":
        # A session has an image already.
        body = body.replace("$ memcg-inspect ", f"$ {prog} ").replace(" -c vmcore\n", "\n")
    lines = (f"  {line}".rstrip() for line in body.splitlines())
    return "\n".join(["examples:", *lines, ""])
