# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page counters
-------------

A page counter of a memcg includes the charges of its descendants, also of removed ones, whose
counters stay as they were (``page_counter_charge()``). So what is charged to a memcg, and to the
removed memcgs that it pays for, is its counter less those of its nearest live descendants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memcg_inspect.checks.rows import Missing, RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import StackRef
from memcg_inspect.report import Row

__all__ = (
    "most_swapped",
    "of_counter",
    "only_on_v1",
    "own_usage",
    "page_counter_row",
    "swap_entries",
    "why_swap_missing",
)


def own_usage(snapshot: Snapshot, usage: Mapping[int, int]) -> dict[int, int | None]:
    """
    Return what is charged to each live memcg itself.

    :param usage: usage of one page counter by memcg, without those that could not be read
    :return: ``None`` if it cannot be known
    """
    own: dict[int, int | None] = {m.address: usage.get(m.address) for m in snapshot.live()}
    for memcg in snapshot.live():
        if memcg.parent is None:
            continue
        above, part = snapshot.memcgs[memcg.parent].payer, usage.get(memcg.address)
        whole = own[above]
        own[above] = None if whole is None or part is None else whole - part
    return own | dict.fromkeys(snapshot.counters.partial)


def page_counter_row(
    snapshot: Snapshot,
    key: RowKey,
    found: Mapping[str, int],
    own: int | None,
    usage: Mapping[int, int],
    missing: Missing | None,
) -> Row:
    """
    Compare what was found with what is charged to a memcg itself.

    :param own: see :func:`own_usage`; ``None`` if it cannot be known
    :param usage: the page counter by memcg, descendants included
    :param missing: why charges may be missing from *found*; ``None`` if none is
    """
    memcg = key.memcg or 0
    return make_row(
        key,
        found,
        None if own is None else {"page_counter": own},
        missing,
        unread=snapshot.unread(memcg),
        hierarchy=usage.get(memcg),
    )


def of_counter(snapshot: Snapshot, name: str) -> dict[int, int]:
    """Return the usage of a page counter other than ``memory`` by memcg."""
    return {memcg: usage for (memcg, n), usage in snapshot.page_counters.items() if n == name}


def only_on_v1(name: str, of: str) -> Callable[[Snapshot], str | None]:
    """
    Return a function that returns why a kernel does not keep a page counter of cgroup v1.

    :param name: member of ``struct mem_cgroup``
    :param of: what it counts, in words
    """

    def why_not(snapshot: Snapshot) -> str | None:
        if name in snapshot.features.page_counters:
            return None
        return f"only cgroup v1 has a page counter of {of}"

    return why_not


def swap_entries(snapshot: Snapshot) -> dict[int, int]:
    """Return the swap entries of each live memcg, and of the removed ones that it pays for."""
    entries = {memcg.address: 0 for memcg in snapshot.live()}
    for address, number in snapshot.swap_entries.items():
        entries[snapshot.memcgs[address].payer] += number
    return entries


def why_swap_missing(snapshot: Snapshot) -> Missing | None:
    """Return why swap entries may be missing."""
    if snapshot.complete("swap_ids"):
        return None
    return missing_if("the memcgs of swap entries are not all in the image")


def most_swapped(task: StackRef) -> int:
    """
    Return the most pages that a task has charged to swap without recording the memcg, or the
    other way round.

    ``mem_cgroup_try_charge_swap()`` charges all pages of a folio before it records the ID.
    """
    is_unknown = not task.functions
    return _HUGE if is_unknown or any("swap" in f for f in task.functions) else 0


#: Pages of the largest folio that is swapped.
_HUGE = 512
