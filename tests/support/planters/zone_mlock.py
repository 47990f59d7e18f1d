# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``zone_mlock`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject
from support.zones import wrong


def vm_stat(subject: Subject, size: int) -> Fault:
    """Change the counter of a zone."""
    return wrong(subject, "NR_MLOCK", size)


PLANTERS = (Planter("the counter of a zone", vm_stat, (1, -2, 4_000)),)
