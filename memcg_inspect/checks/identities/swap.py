# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``swap``
-----------------

For each memcg: ``MEMCG_SWAP`` is the number of swap entries that record its ID. See
``__mem_cgroup_try_charge_swap()``; on cgroup v1, ``mem_cgroup_swapout()``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check, in_flight
from memcg_inspect.checks.half_done import FLUSH, HalfDone, block_pages, pattern
from memcg_inspect.checks.held_on_stack import held_on_stack
from memcg_inspect.checks.page_counters import most_swapped, swap_entries, why_swap_missing
from memcg_inspect.checks.rows import RowKey, counter_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "FUNCTIONS", "swap_rows")

ITEM = "MEMCG_SWAP"
#: Functions that charge swap, as regular expressions.
FUNCTIONS = r"mem_cgroup_\w*swap|memcg1_swap|swap_|swapcache_|add_to_swap|put_swap|free_swap|folio_"


def swap_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the swap entries of each memcg with their counter."""
    missing = why_swap_missing(snapshot)
    return [
        counter_row(snapshot, RowKey("swap", ITEM, "pages", memcg), {"swap": entries}, missing)
        for memcg, entries in swap_entries(snapshot).items()
    ]


CHECK = Check(
    name="swap",
    counter="`MEMCG_SWAP`",
    unit="pages",
    found="swap entries that record the ID of the memcg",
    sources=("swap",),
    places=("folded", "pending_cpu"),
    rows=swap_rows,
    items=(ITEM,),
    explain=lambda snapshot, row: in_flight(held_on_stack(snapshot, row, most_swapped)),
    half_done=HalfDone(pattern(FUNCTIONS, FLUSH), block_pages),
)
