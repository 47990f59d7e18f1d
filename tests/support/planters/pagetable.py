# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``pagetable`` must name."""

from __future__ import annotations

from support.counter_planter import counter

# On s390x, no memcg is charged for page tables in 6.1.
PLANTERS = (counter("kmem", "table", ("NR_PAGETABLE",), (1, -20, 5_000), of_any=True),)
