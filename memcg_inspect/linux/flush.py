# SPDX-License-Identifier: LGPL-2.1-or-later
"""
When counters of memcgs are folded
----------------------------------

Mirrors ``mem_cgroup_flush_stats()`` and ``memcg_rstat_updated()`` of :linux:`mm/memcontrol.c`.
Counters are folded every two seconds, and before they are read if the kernel knows of enough
changes. Each CPU counts changes, in pages or events and at least one for each, up to a batch.
"""

from __future__ import annotations

from drgn import FaultError, Object, Program
from drgn.helpers.linux.cpumask import for_each_online_cpu

from memcg_inspect.linux.layout import has_member
from memcg_inspect.linux.mmzone import mem_map, possible_cpus

__all__ = ("FlushRule",)

#: ``MEMCG_CHARGE_BATCH`` (6.1).
_BATCH = 64


class FlushRule:
    """
    What a kernel lets pass before it folds counters for a reader.

    :ivar most_changes: changes that may be there without a reader folding them
    """

    def __init__(self, prog: Program) -> None:
        self._prog = prog
        self._online = sum(1 for _ in for_each_online_cpu(prog))
        cpus = len(possible_cpus(prog))
        # Commit 8d59d2214c23 ("mm: memcg: make stats flushing threshold per-memcg") (in v6.8).
        self._is_own = has_member(prog, "struct memcg_vmstats", "stats_updates")
        if self._is_own:
            # In the memcg's own number, and what CPUs have not added to that.
            self.most_changes = _BATCH * self._online + (_BATCH - 1) * cpus
        else:
            # One number for all memcgs, which counts full batches. What was more than one and
            # less than two went in as one, and a CPU adds when it is over the batch.
            self.most_changes = (2 * _BATCH - 1) * self._online + _BATCH * cpus

    def is_due(self, memcg: Object) -> bool | None:
        """
        Return whether counters are folded before a reader of a memcg sees them.

        :param memcg: ``struct mem_cgroup *``
        :return: ``None`` if that is not in the image
        """
        try:
            if self._is_own:
                changes = int(memcg.vmstats.stats_updates.counter)
                return changes > _BATCH * self._online
            return int(self._prog["stats_flush_threshold"].counter) > self._online
        except (FaultError, LookupError):
            return None

    def bound(self, item: str) -> int:
        """
        Return how far the counter of an item may be off where no folding is due.

        A change of bytes or KiB counts as so many whole pages, or as one: as half of what it
        is at least. (Up to 6.6 it counted as so many bytes, and the bound was not reached.)

        :param item: an enumerator
        :return: in the unit of the item
        """
        if item.endswith("_B"):
            return self.most_changes * 2 * mem_map(self._prog).page_size
        if item.endswith("_KB"):
            return self.most_changes * 2 * mem_map(self._prog).page_size // 1024
        return self.most_changes
