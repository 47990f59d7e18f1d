# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``swap_usage``
-----------------------

For each memcg on cgroup v2, the page counter ``swap`` is the number of swap entries that record its
ID. On cgroup v1, the page counter ``memsw`` is the sum of ``memory`` and these entries, since a
page that is swapped out is uncharged from ``memory`` only. The entries of the root memcg are in
neither counter. Counters of the children are subtracted before the comparison.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check, in_flight
from memcg_inspect.checks.half_done import (
    CHARGING,
    LRU,
    PAGES,
    HalfDone,
    batch_pages,
    folio_pages,
    pattern,
)
from memcg_inspect.checks.held_on_stack import held_on_stack
from memcg_inspect.checks.identities.swap import FUNCTIONS
from memcg_inspect.checks.page_counters import (
    most_swapped,
    of_counter,
    own_usage,
    page_counter_row,
    swap_entries,
    why_swap_missing,
)
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "swap_usage_rows")

V2, V1 = "swap", "memsw"


def swap_usage_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the swap entries of each memcg with its page counter."""
    name = V2 if V2 in snapshot.features.page_counters else V1
    usage, missing = of_counter(snapshot, name), why_swap_missing(snapshot)
    own, memory = own_usage(snapshot, usage), own_usage(snapshot, snapshot.usage)
    root, rows = next(iter(snapshot.memcgs)), []
    for memcg, entries in swap_entries(snapshot).items():
        if memcg == root:
            entries -= snapshot.swap_entries.get(root, 0)
        found: dict[str, int] = {"swap": entries}
        share = own[memcg]
        if name == V1:
            part = memory[memcg]
            found["memory"] = part or 0
            share = None if part is None else share
        key = RowKey("swap_usage", f"{name}.usage", "pages", memcg)
        rows.append(page_counter_row(snapshot, key, found, share, usage, missing))
    return rows


def _not_kept(snapshot: Snapshot) -> str | None:
    if {V2, V1}.intersection(snapshot.features.page_counters):
        return None
    return "the page counters of swap of this kernel are not known"


CHECK = Check(
    name="swap_usage",
    counter="the page counter behind `memory.swap.current`, or `memory.memsw.usage_in_bytes`",
    unit="pages",
    found=(
        "swap entries that record the ID of the memcg, and on cgroup v1 its page counter `memory`"
    ),
    sources=("swap", "memory"),
    places=("page_counter",),
    rows=swap_usage_rows,
    page_counters=(V2, V1),
    not_kept=_not_kept,
    of_subtrees=True,
    explain=lambda snapshot, row: in_flight(held_on_stack(snapshot, row, most_swapped)),
    half_done=HalfDone(
        pattern(FUNCTIONS, LRU, PAGES),
        batch_pages,
        folios=folio_pages,
        only_in=pattern(CHARGING, r"mem_cgroup_\w*swap|memcg1_swap"),
    ),
)
