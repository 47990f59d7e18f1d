# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``tcpmem`` must name."""

from __future__ import annotations

from support.page_counter_planter import page_counter

PLANTERS = (page_counter(("tcpmem",), (1, -2, 4_000)),)
