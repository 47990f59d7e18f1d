# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of memcgs
------------------

A folded counter includes the memcg's descendants, removed ones too: what was booked on a removed
memcg stays in it, and later changes are booked on its parent. So a memcg's own share is its
hierarchical value less those of its nearest descendants that are alive:

    H(m)   = state(m) + sum over m and all its descendants d of (pending(d) + percpu(d))
    own(m) = H(m) - sum of H(c) over the nearest live descendants c
           = state(m) - sum of state(c) + sum over m and the removed memcgs d that it pays
             for of (pending(d) + percpu(d))

A memcg is folded into its parent before it is freed (``mem_cgroup_css_rstat_flush()``), so its
changes are not lost. The values that exclude descendants (``state_local``) cannot be used instead:
what was booked on a memcg is lost from them when it is freed, unless the kernel gave it to the
parent before; see :mod:`memcg_inspect.checks.identities.local`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from memcg_inspect.model import Memcg, Stat

__all__ = ("CounterValue", "Counters", "FoldedShare")

Stats = Mapping[str, Stat]


class CounterValue(NamedTuple):
    """A counter of a memcg, in the unit of its item."""

    folded: int
    """The part that a reader of ``memory.stat`` sees without a flush."""
    pending: int
    """The part in per-CPU and per-memcg deltas that are not folded yet."""

    @property
    def exact(self) -> int:
        """Return what a reader sees after a flush."""
        return self.folded + self.pending


class FoldedShare(NamedTuple):
    """
    A memcg's own share of a counter, without the changes of CPUs, in the unit of its item.

    :ivar state: ``state`` of the memcg, less that of its nearest live descendants
    :ivar pending: ``state_pending`` of the memcg and the removed ones that it pays for
    :ivar local: ``state_local`` of the same memcgs
    """

    state: int
    pending: int
    local: int


class Counters:
    """
    The counters of all memcgs. All mappings of memcgs have the same items, and all those of a node.

    :param memcgs: all memcgs, parents first
    :param memcg_stats: counters of memcgs; missing where they could not be read
    :param lruvec_stats: counters by (memcg, nid), likewise
    :param nids: nodes that memcgs have counters for, whether these were read or not. They include
        possible nodes that are offline. If not given, the nodes of *lruvec_stats*
    """

    def __init__(
        self,
        memcgs: Mapping[int, Memcg],
        memcg_stats: Mapping[int, Stats],
        lruvec_stats: Mapping[tuple[int, int], Stats],
        nids: Iterable[int] = (),
    ) -> None:
        self.memcgs = memcgs
        self.nids = tuple(sorted({*nids, *(nid for _, nid in lruvec_stats)}))
        self._memcg_stats = memcg_stats
        self._lruvec_stats = lruvec_stats
        self._children: dict[int, list[int]] = {}  # nearest live descendants
        self._removed: dict[int, list[int]] = {}  # those that a memcg pays for
        for memcg in memcgs.values():
            if memcg.payer != memcg.address:
                self._removed.setdefault(memcg.payer, []).append(memcg.address)
            elif memcg.parent is not None:
                self._children.setdefault(memcgs[memcg.parent].payer, []).append(memcg.address)
        # A child that could not be read is in its parent's counters all the same.
        self.partial = frozenset(m.payer for m in memcgs.values() if not m.whole)
        self._changes: dict[int | None, _Changes] = {}
        self._active: dict[int, frozenset[str] | None] = {}
        self._not_zero: dict[int, frozenset[str] | None] = {}
        self._items: dict[int | None, frozenset[str]] = {}

    def stat(self, memcg: int, item: str, nid: int | None = None) -> Stat | None:
        """Return a counter as the kernel keeps it; ``None`` if it was not read."""
        stats = self._stats(memcg, nid)
        return None if stats is None else stats.get(item)

    def hierarchical(self, memcg: int, item: str, nid: int | None = None) -> CounterValue | None:
        """Return H of a memcg: what it and all its descendants claim, whether flushed or not."""
        stat, changes = self.stat(memcg, item, nid), self._changes_below(nid)
        if stat is None or memcg in changes.unknown:
            return None
        return CounterValue(stat.state, changes.amounts[memcg].get(item, 0))

    def hierarchical_sum(
        self, memcg: int, items: Iterable[str], nid: int | None = None
    ) -> CounterValue | None:
        """Return the sum of :meth:`hierarchical` of items; ``None`` if one is ``None``."""
        return _sum_of(self.hierarchical(memcg, item, nid) for item in items)

    def own_sum(
        self, memcg: int, items: Iterable[str], nid: int | None = None
    ) -> CounterValue | None:
        """Return the sum of :meth:`own` of items; ``None`` if one is ``None``."""
        return _sum_of(self.own(memcg, item, nid) for item in items)

    def own(self, memcg: int, item: str, nid: int | None = None) -> CounterValue | None:
        """
        Return what a live memcg, and the removed ones below it, claim for themselves.

        :return: ``None`` if a counter, or the memcg that has one, could not be read
        """
        stat = self.stat(memcg, item, nid)
        if stat is None or memcg in self.partial:
            return None
        folded, pending = stat.state, stat.pending + stat.percpu
        for child in self._children.get(memcg, ()):
            part = self.stat(child, item, nid)
            if part is None:
                return None
            folded -= part.state
        for removed in self._removed.get(memcg, ()):
            part = self.stat(removed, item, nid)
            if part is None:
                return None
            pending += part.pending + part.percpu
        return CounterValue(folded, pending)

    def is_active(self, memcg: int, item: str) -> bool:
        """
        Return whether a live memcg may claim some of an item for itself, on any node.

        Most of the counters of a memcg are 0. These need not be looked at node by node.

        :return: also ``True`` if some counters of the memcg could not be read. Whether those of the
            item are read of any memcg, :meth:`has` tells
        """
        if memcg not in self._active:
            self._active[memcg] = self._active_items(memcg)
        items = self._active[memcg]
        return items is None or item in items

    def is_zero(self, memcg: int, item: str, nid: int | None = None) -> bool:
        """
        Return whether a live memcg's counters of an item were read and are 0, on all nodes.

        :param nid: node whose counter must have been read; ``None`` for that of the memcg
        :return: also ``False`` if parts of the memcg and of those below it add up to nothing
        """
        return not self.is_active(memcg, item) and self.has(item, nid)

    def has(self, item: str, nid: int | None = None) -> bool:
        """
        Return whether counters of an item were read.

        :param nid: node; ``None`` for those of memcgs
        """
        items = self._items.get(nid)
        if items is None:
            some = (
                self._memcg_stats.values()
                if nid is None
                else (stats for (_, of), stats in self._lruvec_stats.items() if of == nid)
            )
            items = self._items[nid] = frozenset(next(iter(some), ()))
        return item in items

    def _active_items(self, memcg: int) -> frozenset[str] | None:
        """Return the items that :meth:`is_active` is about; ``None`` for all."""
        if memcg in self.partial:
            return None
        found: set[str] = set()
        for one in (memcg, *self._children.get(memcg, ()), *self._removed.get(memcg, ())):
            if one not in self._not_zero:
                self._not_zero[one] = self._not_zero_of(one)
            items = self._not_zero[one]
            if items is None:
                return None
            found |= items
        return frozenset(found)

    def _not_zero_of(self, memcg: int) -> frozenset[str] | None:
        """Return the items of a memcg of which any part is not 0, on any node."""
        found: set[str] = set()
        zero: Stat | None = None  # the last one: most counters that are 0 are the same object
        for nid in (None, *self.nids):
            stats = self._stats(memcg, nid)
            if stats is None:
                return None
            for item, stat in stats.items():
                if stat is zero:
                    continue
                if any(stat):
                    found.add(item)
                else:
                    zero = stat
        return frozenset(found)

    def folded_share(self, memcg: int, item: str, nid: int | None = None) -> FoldedShare | None:
        """
        Return what a live memcg, and the removed ones below it, claim without unflushed changes.

        :return: ``None`` if a counter, or the memcg that has one, could not be read, or if the
            kernel has no local counters
        """
        if memcg in self.partial:
            return None
        first = self.stat(memcg, item, nid)
        if first is None:
            return None
        state, pending, local = first.state, 0, 0
        for child in self._children.get(memcg, ()):
            part = self.stat(child, item, nid)
            if part is None:
                return None
            state -= part.state
        for payer in (memcg, *self._removed.get(memcg, ())):
            part = self.stat(payer, item, nid)
            if part is None or part.local is None:
                return None
            pending, local = pending + part.pending, local + part.local
        return FoldedShare(state, pending, local)

    def _changes_below(self, nid: int | None) -> _Changes:
        """Return the changes that are not folded, of memcgs and all their descendants."""
        known = self._changes.get(nid)
        if known is not None:
            return known
        found = self._changes[nid] = _Changes({}, set())
        for memcg in reversed(list(self.memcgs.values())):  # children first
            stats = self._stats(memcg.address, nid)
            below = found.amounts.setdefault(memcg.address, {})
            for item, stat in (stats or {}).items():
                if stat.pending or stat.percpu:
                    below[item] = below.get(item, 0) + stat.pending + stat.percpu
            if stats is None or not memcg.whole:
                found.unknown.add(memcg.address)
            if memcg.parent is None:
                continue
            above = found.amounts.setdefault(memcg.parent, {})
            for item, amount in below.items():
                above[item] = above.get(item, 0) + amount
            if memcg.address in found.unknown:
                found.unknown.add(memcg.parent)
        return found

    def _stats(self, memcg: int, nid: int | None) -> Stats | None:
        if nid is None:
            return self._memcg_stats.get(memcg)
        return self._lruvec_stats.get((memcg, nid))


class _Changes(NamedTuple):
    """
    Changes that are not folded, of memcgs and all their descendants.

    :ivar amounts: by ``struct mem_cgroup *`` and item, where there are any
    :ivar unknown: memcgs some of whose changes, or those of a descendant, could not be read
    """

    amounts: dict[int, dict[str, int]]
    unknown: set[int]


def _sum_of(values: Iterable[CounterValue | None]) -> CounterValue | None:
    folded = pending = 0
    for value in values:
        if value is None:
            return None
        folded, pending = folded + value.folded, pending + value.pending
    return CounterValue(folded, pending)
