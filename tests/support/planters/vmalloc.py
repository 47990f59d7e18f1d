# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``vmalloc`` must name."""

from __future__ import annotations

from support.counter_planter import counter

PLANTERS = (
    counter(
        "kmem",
        "vmalloc",
        (
            "NR_VMALLOC",
            "MEMCG_VMALLOC",
        ),
        (5, -1, 4_000),
    ),
)
