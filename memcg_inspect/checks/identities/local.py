# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``local``
------------------

For each memcg, and each item whose local counter the kernel reparents: the local counter of the
memcg and of the removed memcgs that it pays for is the memcg's own share of the counter that
includes descendants:

    state_local = state of the memcg - state of its nearest live descendants + state_pending

A flush changes both sides alike (``mem_cgroup_stat_aggregate()``). When a memcg is freed, what is
left in its local counter is lost. So the two sides can only be equal if the kernel gave the local
counter to the parent before (``reparent_state_local()``): since 7.3, the sizes of LRU lists and
slab memory, which ``count_shadow_nodes()`` reads; on cgroup v1 since 7.1, the sizes of LRU lists
and what ``memory.stat`` shows there. Other local counters are wrong once a memcg was removed.

The kernel takes a negative local counter for 0 (``lruvec_page_state_local()``), and then gives
nothing to the parent. That happens with slab memory: an object that was allocated on one CPU and
freed on another is in the stocks of both, and one of them may be drained before the other. So the
parent of removed memcgs may have too much slab memory, by no more than the stocks can hold for each
of them. For slab memory, the kernel promises no more than that the local counter is not too low:
what it may have kept by mistake is shown as ``clamped``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import FLUSH, HalfDone, pattern
from memcg_inspect.checks.identities.levels import why_not_flushed
from memcg_inspect.checks.identities.page_levels import unit_of
from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.checks.rows import RowKey, doubted, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "local_rows")

#: The most bytes of one kind of slab memory that the stock of a CPU holds: ``S16_MAX``, or a page.
_MOST_IN_STOCK = 1 << 15
#: Removed memcgs, if their number is not known.
_MOST_MEMCGS = 1 << 32
_UNKNOWN = "how many memcgs were removed is not known, which leave slab memory in this counter"


def local_rows(snapshot: Snapshot) -> list[Row]:
    """Compare local counters with the memcgs' own shares, where either is not zero."""
    items, is_zero = snapshot.features.local, snapshot.counters.is_zero
    keys: list[tuple[str, int | None]] = [(item, None) for item in sorted(items.of_memcgs)]
    keys += [(item, nid) for nid in snapshot.image.nodes for item in sorted(items.of_nodes)]
    keys = [(item, nid) for item, nid in keys if item in snapshot.features.items]
    rows = [
        _row(snapshot, RowKey("local", item, unit_of(item), memcg.address, nid))
        for memcg in snapshot.live()
        for item, nid in keys
        if not is_zero(memcg.address, item, nid)
    ]
    return [row for row in rows if not row.is_zero]


def _row(snapshot: Snapshot, key: RowKey) -> Row:
    memcg = key.memcg or 0
    share = snapshot.counters.folded_share(memcg, key.item, key.nid)
    found: dict[str, int] = {}
    unknown = False
    if share is not None:
        found = {"state": share.state, "state_pending": share.pending}
        too_much = share.local - share.state - share.pending
        if key.item in ITEMS.values() and too_much > 0:
            removed = snapshot.csses_since.get(memcg)
            unknown = removed is None and too_much <= _most_clamped(snapshot, key, _MOST_MEMCGS)
            if removed is not None and too_much <= _most_clamped(snapshot, key, removed):
                found["clamped"] = too_much
    row = make_row(
        key,
        found,
        None if share is None else {"state_local": share.local},
        unread=snapshot.unread(memcg),
        hierarchy=snapshot.folded(memcg, key.item, key.nid),
    )
    # What a removed memcg had on a node is moved to its parent for the memcg as a whole, too.
    nids = snapshot.counters.nids if key.nid is None else [key.nid]
    why = why_not_flushed(snapshot, key.item, nids) or (_UNKNOWN if unknown else None)
    return doubted(row, missing_if(why, either_way=True))


def _most_clamped(snapshot: Snapshot, key: RowKey, removed: int) -> int:
    """Return the most bytes that so many removed memcgs may have left in a local counter."""
    nodes = 1 if key.nid is not None else len(snapshot.counters.nids)
    in_stock = max(_MOST_IN_STOCK, snapshot.image.page_size)
    return removed * in_stock * snapshot.image.cpus * nodes


def _not_kept(snapshot: Snapshot) -> str | None:
    if snapshot.features.local.of_nodes:
        return None
    return "this kernel loses the local counters of memcgs that are removed"


CHECK = Check(
    name="local",
    counter=(
        "`state_local` of `NR_SLAB_RECLAIMABLE_B`, `NR_SLAB_UNRECLAIMABLE_B` and the LRU items, of "
        "the memcg and by node; on cgroup v1 those of the LRU items, and those in `memory.stat`"
    ),
    unit="bytes, pages",
    found=(
        "the memcg's own share of the counter that includes descendants, without changes that are "
        "not folded. Counters that are 0 on both sides have no row"
    ),
    sources=("state", "state_pending", "clamped"),
    places=("state_local",),
    rows=local_rows,
    not_kept=_not_kept,
    counters_only=True,
    half_done=HalfDone(pattern(FLUSH), lambda snapshot: 0),
    above="local-counter-above",
    below="local-counter-below",
)
