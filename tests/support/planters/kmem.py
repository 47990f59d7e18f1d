# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``kmem`` must name."""

from __future__ import annotations

from support.counter_planter import counter

PLANTERS = (counter("kmem", None, ("MEMCG_KMEM", "NR_KMEM"), (-2, 1, 30_000)),)
