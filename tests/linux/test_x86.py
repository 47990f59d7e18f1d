# SPDX-License-Identifier: LGPL-2.1-or-later
"""The format of the page tables follows from VMCOREINFO, which may be damaged."""

from __future__ import annotations

import pytest
from support.made_memory import BASE, MadeMemory

from memcg_inspect.linux.arch.x86 import x86_geometry
from memcg_inspect.model import ImageError


def levels(text: bytes) -> int:
    made = MadeMemory()
    made.write(BASE, text)
    made.variable("VMCOREINFO", made.array(made.char, len(text) + 1), BASE)
    return x86_geometry(made.image).levels


def test_levels() -> None:
    assert levels(b"OSRELEASE=7.3\n") == 4
    assert levels(b"NUMBER(pgtable_l5_enabled)=1\nNUMBER(sme_mask)=0\n") == 5
    assert levels(b"NUMBER(sme_mask)=0x800000000000\nNUMBER(pgtable_l5_enabled)=0\n") == 4
    assert levels(b"\xff\xfe\nNUMBER(pgtable_l5_enabled)=1\n") == 5


@pytest.mark.parametrize("number", [b"x", b"0x", b"01", b"9_", b"-a"])
@pytest.mark.parametrize("name", [b"pgtable_l5_enabled", b"sme_mask"])
def test_numbers_that_are_none(name: bytes, number: bytes) -> None:
    with pytest.raises(ImageError, match=rf"VMCOREINFO is damaged: NUMBER\({name.decode()}\)="):
        levels(b"NUMBER(%s)=%s\n" % (name, number))
