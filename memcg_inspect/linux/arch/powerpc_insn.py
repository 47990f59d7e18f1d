# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code of powerpc
-----------------------

Finds instructions of a few forms in the text of a little-endian function, as
:linux:`arch/powerpc/include/asm/ppc-opcode.h` describes them. All instructions have 4 bytes.

Functions have two entries (ELF ABI v2): calls from the kernel itself go to the local one, which is
behind two instructions.
"""

from __future__ import annotations

from memcg_inspect.linux.arch.fixed_insn import FixedInstructions

__all__ = (
    "CALL_SIZE",
    "ENTRIES",
    "called",
    "called_before",
    "is_thunk",
    "jumped_to",
    "loads_member",
    "stores_member",
)

#: Size of an instruction in bytes, and so of a call.
CALL_SIZE = 4
#: Offsets of the entries of a function, in bytes.
ENTRIES = (0, 8)
#: ``ld r, offset(r)`` and ``std r, offset(r)``; ``bl`` and ``b``, whose distance is in bytes.
_CODE = FixedInstructions(
    member_mask=0xFC00FFFF,
    load=0xE8000000,
    store=0xF8000000,
    unit=4,
    offset_shift=0,
    base_shift=16,
    sp=1,
    branch_mask=0xFC000003,
    call=0x48000001,
    jump=0x48000000,
    distance_mask=0x03FFFFFC,
    distance_unit=1,
)

loads_member, stores_member = _CODE.loads_member, _CODE.stores_member
called, jumped_to, called_before = _CODE.called, _CODE.jumped_to, _CODE.called_before


def is_thunk(name: str) -> bool:
    """Return whether a function stands for an indirect call. powerpc has none."""
    return False
