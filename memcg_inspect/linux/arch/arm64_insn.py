# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Machine code of arm64
---------------------

Finds instructions of a few forms in the text of a function, as
:linux:`arch/arm64/include/asm/insn.h` describes them. All instructions have 4 bytes and are
little-endian.
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
ENTRIES = (0,)
#: ``ldr x, [x, #imm]`` and ``str x, [x, #imm]``, whose offset is in units of 8 bytes; ``bl`` and
#: ``b``, whose distance is in units of instructions.
_CODE = FixedInstructions(
    member_mask=0xFFFFFC00,
    load=0xF9400000,
    store=0xF9000000,
    unit=8,
    offset_shift=7,
    base_shift=5,
    sp=31,
    branch_mask=0xFC000000,
    call=0x94000000,
    jump=0x14000000,
    distance_mask=0x03FFFFFF,
    distance_unit=4,
)

loads_member, stores_member = _CODE.loads_member, _CODE.stores_member
called, jumped_to, called_before = _CODE.called, _CODE.jumped_to, _CODE.called_before


def is_thunk(name: str) -> bool:
    """Return whether a function stands for an indirect call. arm64 has none."""
    return False
