# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``local_fold``
-----------------------

For each memcg, and each memcg on a node, of all memcgs, removed ones too: the local counter is what
its CPUs have folded so far:

    state_local = sum over all possible CPUs of state_prev

Only ``mem_cgroup_stat_aggregate()`` changes either, by the same amount. What the changes were does
not matter, so this holds for each item.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import FLUSH, HalfDone, pattern
from memcg_inspect.checks.identities.page_levels import unit_of
from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model_counters import LocalStat
from memcg_inspect.report import Row

__all__ = ("CHECK", "local_fold_rows")

#: Items that have a row in any case.
_ALWAYS = tuple(ITEMS.values())
_ZERO, _NONE = LocalStat(0, 0), (None, None)
_UNREAD = "its counter is not in the image"


def local_fold_rows(snapshot: Snapshot) -> list[Row]:
    """Compare local counters with what CPUs folded: those of slab memory, and all that differ."""
    rows = []
    for memcg in snapshot.memcgs:
        for nid in (None, *snapshot.image.nodes):
            stats = snapshot.local.get((memcg, nid))
            if stats is None:
                if snapshot.counters.stat(memcg, _ALWAYS[0], nid) is None:
                    rows += [_row(memcg, nid, item, None, None) for item in _ALWAYS]
                continue
            for item in _ALWAYS:
                is_read = snapshot.counters.has(item, nid)
                rows.append(_row(memcg, nid, item, *stats.get(item, _ZERO if is_read else _NONE)))
            rows += [
                _row(memcg, nid, item, *stat)
                for item, stat in stats.items()
                if stat.local != stat.flushed and item not in _ALWAYS
            ]
    return rows


def _row(memcg: int, nid: int | None, item: str, local: int | None, flushed: int | None) -> Row:
    return make_row(
        RowKey("local_fold", item, unit_of(item), memcg, nid),
        {} if flushed is None else {"state_prev": flushed},
        None if local is None else {"state_local": local},
        unread=_UNREAD,
    )


def _not_kept(snapshot: Snapshot) -> str | None:
    if snapshot.features.has_local:
        return None
    return "this kernel adds up local counters when they are read: it has no state_local"


CHECK = Check(
    name="local_fold",
    counter="`state_local` of each item, of the memcg and by node",
    unit="bytes, pages, KiB",
    found=(
        "what its CPUs have folded so far. Counters other than those of slab memory have a row "
        "only where they differ"
    ),
    sources=("state_prev",),
    places=("state_local",),
    rows=local_fold_rows,
    not_kept=_not_kept,
    counters_only=True,
    half_done=HalfDone(pattern(FLUSH), lambda snapshot: 0),
    above="local-counter-above",
    below="local-counter-below",
)
