# SPDX-License-Identifier: LGPL-2.1-or-later
"""Calls of x86-64, as the GNU assembler writes them."""

from __future__ import annotations

import pytest

from memcg_inspect.linux.arch.x86_insn import called_before

RETURN = 0xFFFFFFFF81000105


@pytest.mark.parametrize(
    ("text", "callee"),
    [
        ("e8 fb 0f 00 00", 0xFFFFFFFF81001100),  # call .+0x1000
        ("e8 fb fe ff ff", RETURN - 0x105),  # call .-0x100
        ("e9 fb 0f 00 00", None),  # jmp
        ("00 00 00 ff d0", None),  # call *%rax
        ("e8 fb 0f 00", None),  # the text begins in the middle of it
        ("", None),
    ],
)
def test_the_call_before_a_return_address(text: str, callee: int | None) -> None:
    assert called_before(bytes.fromhex(text), RETURN) == callee
