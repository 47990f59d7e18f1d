# SPDX-License-Identifier: LGPL-2.1-or-later
"""Small pieces of text that all renderers write alike."""

from __future__ import annotations

__all__ = ("amount", "printable", "signed")


def printable(text: str) -> str:
    """
    Make a name from an image safe to show.

    Names of cgroups, caches and tasks are chosen by whoever ran on the machine: they may
    hold control sequences.
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def amount(value: int | None) -> str:
    """Write an amount with thousands set apart; what was not read is a dash."""
    return "-" if value is None else f"{value:,}"


def signed(value: int | None) -> str:
    """Write a difference with its sign."""
    return "-" if value is None else f"{value:+,}" if value else "0"
