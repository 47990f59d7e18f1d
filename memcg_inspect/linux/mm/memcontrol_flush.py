# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Flushing of memcg counters
--------------------------

Mirrors ``memcg_rstat_updated()`` and ``memcg_vmstats_needs_flush()`` of
:linux:`mm/memcontrol.c`. A reader of ``memory.stat`` flushes the per-CPU changes only if more
than ``MEMCG_CHARGE_BATCH * num_online_cpus()`` updates are outstanding. The counters that it
shows may therefore be out of date by a bounded amount.

What differs between kernel releases:

- up to 6.7, all memcgs share one number, ``stats_flush_threshold``, which counts whole batches;
- since commit 8d59d2214c23 ("mm: memcg: make stats flushing threshold per-memcg") (in v6.8),
  each memcg has its own, ``memcg->vmstats->stats_updates``, and counts updates;
- up to 6.6, a change of an item in bytes or KiB counted as that many updates; later kernels
  convert it to pages first (``memcg_state_val_in_pages()``).
"""

from __future__ import annotations

from drgn import Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.memcontrol_stock import MEMCG_CHARGE_BATCH
from memcg_inspect.linux.mm.mmzone import mem_map, online_cpus, possible_cpus

__all__ = ("FlushRule",)


class FlushRule:
    """
    When a kernel flushes counters for a reader, and how far they can be off if it does not.

    :ivar most_updates: the most updates that can be outstanding without a flush being due
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self._online = len(online_cpus(image))
        cpus = len(possible_cpus(image))
        self._per_memcg = has_member(image, "struct memcg_vmstats", "stats_updates")
        if self._per_memcg:
            # The threshold, and less than one batch on each CPU.
            threshold = MEMCG_CHARGE_BATCH * self._online
            self.most_updates = threshold + (MEMCG_CHARGE_BATCH - 1) * cpus
        else:
            # A CPU adds x / MEMCG_CHARGE_BATCH to the threshold once x is over a batch: each
            # unit stands for less than two batches. A CPU holds back one batch at most.
            most_per_unit = 2 * MEMCG_CHARGE_BATCH - 1
            self.most_updates = most_per_unit * self._online + MEMCG_CHARGE_BATCH * cpus

    def is_due(self, memcg: Object) -> bool | None:
        """
        Return whether the kernel flushes the counters of a memcg before it shows them.

        :param memcg: ``struct mem_cgroup *``
        :return: ``None`` if the symbols of the image do not have the number of updates
        :raises drgn.FaultError: if the number of updates is not in the image
        """
        try:
            if self._per_memcg:
                updates = int(memcg.vmstats.stats_updates.counter)
                return updates > MEMCG_CHARGE_BATCH * self._online
            return int(self._image.object("stats_flush_threshold").counter) > self._online
        except UnknownKernelError:
            return None

    def bound(self, item: str) -> int:
        """
        Return how far the counter of an item can be off while no flush is due.

        A change of bytes or KiB counts as whole pages, rounded down, but as one page at least.
        An update thus stands for less than two pages. (Up to 6.6 an update stood for less, and
        the bound is not reached.)

        :param item: enumerator
        :return: in the unit of the item
        """
        if item.endswith("_B"):
            return self.most_updates * 2 * mem_map(self._image).page_size
        if item.endswith("_KB"):
            return self.most_updates * 2 * mem_map(self._image).page_size // 1024
        return self.most_updates
