# SPDX-License-Identifier: LGPL-2.1-or-later
"""Names from an image, which are untrusted input, as text that a terminal may show."""

from __future__ import annotations

__all__ = ("printable",)


def printable(text: str) -> str:
    """
    Escape the characters of a text that are not printable.

    Users of the machine choose the names of cgroups, caches and tasks. These may contain control
    sequences for terminals.
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
