# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Half-done charges
-----------------

Which kernel functions make a charge, and how large one charge can be. A CPU that stopped in
such a function may have booked one charge in one place and not yet in another.
:mod:`memcg_inspect.checks.inflight` uses this to explain rows that differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running

__all__ = (
    "CGROUP",
    "CHARGE_BATCH",
    "FLUSH",
    "FOLIO_BATCH",
    "HUGE",
    "LRU",
    "PAGES",
    "PERCPU",
    "SLAB",
    "SOCK",
    "STACK",
    "VMALLOC",
    "HalfDone",
    "largest_object",
    "pattern",
)

# Parts of function names, as regular expressions.
SLAB = r"slab|kmem_cache|kmalloc|kfree|kvfree|obj_cgroup|objcg|sheaf|obj_stock"
PAGES = (
    r"alloc_pages|free_pages|free_unref|get_page|memcg_kmem|_charge|_uncharge|pagetable|p[gmtu4]d_"
)
STACK = r"dup_task_struct|copy_process|thread_stack|release_task_stack|put_task_stack|vfree|vmalloc"
VMALLOC = r"vmalloc|vfree|vm_area|vmap"
LRU = r"folio|lru|_charge|_uncharge|do_anonymous_page|wp_page_copy|unmap|tlb_"
SOCK = r"sk_|skb|tcp_|udp_|sock_|inet_|unix_"
CGROUP = r"cgroup|css_|copy_process|do_exit|mem_cgroup|bpf_|map_create|map_alloc|percpu_ref|rcu_"
PERCPU = r"pcpu_|percpu"
#: mem_cgroup_css_rstat_flush() moves counters from one place to the next, one at a time.
FLUSH = r"rstat_flush|flush_memcg_stats|stat_aggregate"

#: ``MEMCG_CHARGE_BATCH``: pages that a CPU charges in advance.
CHARGE_BATCH = 64
#: ``PAGEVEC_SIZE``: folios that a CPU adds to LRU lists, or uncharges, together.
FOLIO_BATCH = 31
#: Pages of a PMD-sized page, the largest that goes through such a batch.
HUGE = 512

_IN_VMALLOC = re.compile(r"vmalloc|vm_area_alloc_pages")


def pattern(*parts: str) -> re.Pattern[str]:
    """Return a pattern that finds any of these parts."""
    return re.compile("|".join(parts))


def largest_object(snapshot: Snapshot) -> int:
    """Return the most bytes that one slab object is charged: two pages and its pointer."""
    return 2 * snapshot.image.page_size + 8


@dataclass(frozen=True)
class HalfDone:
    """
    How one charge of an identity is made.

    :ivar functions: finds the functions that a CPU is in while it makes one
    :ivar most: returns the largest charge, in the unit of the identity's rows
    :ivar folios: if not 0, a charge may also have all folios in it that the CPU's stack and
        registers point to. This many pages where they could not be read.
    :ivar in_pages: whether *most* and *folios* are pages even where rows are in bytes
    :ivar in_many_rows: whether one charge may show in any number of rows. Otherwise it shows in
        two: that of its memcg, and that of the parent, whose share is computed from it.
    """

    functions: re.Pattern[str]
    most: Callable[[Snapshot], int]
    folios: int = 0
    in_pages: bool = False
    in_many_rows: bool = False

    def largest(self, snapshot: Snapshot, cpu: Running) -> int:
        """Return the most that a CPU may have left half done."""
        most = self.most(snapshot)
        if not self.folios:
            return most
        if cpu.pages is None:
            return most + self.folios
        # vm_area_alloc_pages() charges huge pages before it splits them; they have no order.
        in_vmalloc = any(map(_IN_VMALLOC.search, cpu.functions))
        return most + cpu.pages + (HUGE if in_vmalloc else 0)
