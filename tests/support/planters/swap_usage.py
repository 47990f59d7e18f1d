# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``swap_usage`` must name."""

from __future__ import annotations

from support.page_counter_planter import page_counter

PLANTERS = (page_counter(("swap", "memsw"), (1, -2, 4_000)),)
