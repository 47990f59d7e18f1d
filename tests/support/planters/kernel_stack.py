# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``kernel_stack`` must name."""

from __future__ import annotations

from support.counter_planter import counter

PLANTERS = (counter("kmem", "stack", ("NR_KERNEL_STACK_KB",), (-16, 4, 1, 60_000)),)
