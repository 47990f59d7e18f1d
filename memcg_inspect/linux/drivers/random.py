# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The ID of a boot
----------------

Mirrors ``sysctl_bootid`` of :linux:`drivers/char/random.c`.
"""

from __future__ import annotations

from uuid import UUID

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError

__all__ = ("boot_id",)

_SIZE = 16


def boot_id(image: Image) -> str:
    """Return the ID of the boot; empty if nobody has asked the kernel for it, or if unreadable."""
    try:
        raw = image.memory.read(image.symbol("sysctl_bootid").address, _SIZE)
    except (UnknownKernelError, FaultError):
        return ""
    return str(UUID(bytes=raw)) if any(raw) else ""
