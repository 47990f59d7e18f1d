# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Half-done charges
-----------------

The kernel functions that make a charge, and the largest possible charge. A CPU that was stopped in
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
#: mem_cgroup_css_rstat_flush() moves amounts from one place to the next, one counter at a time.
FLUSH = r"rstat_flush|flush_memcg_stats|stat_aggregate"

#: ``MEMCG_CHARGE_BATCH``: pages that a CPU charges in advance.
CHARGE_BATCH = 64
#: ``PAGEVEC_SIZE``: folios that a CPU adds to LRU lists, or uncharges, together.
FOLIO_BATCH = 31
#: Pages of a PMD-sized folio, the largest folio in such a batch.
HUGE = 512

_IN_VMALLOC = re.compile(r"vmalloc|vm_area_alloc_pages")


def pattern(*parts: str) -> re.Pattern[str]:
    """Return a pattern that matches any of these parts."""
    return re.compile("|".join(parts))


def largest_object(snapshot: Snapshot) -> int:
    """Return the most bytes charged for one slab object: two pages and the pointer."""
    return 2 * snapshot.image.page_size + 8


@dataclass(frozen=True)
class HalfDone:
    """
    How one charge of an identity is made.

    :ivar functions: pattern of functions that make such a charge
    :ivar most: returns the largest charge, in the unit of the identity's rows
    :ivar folios: if not 0, a charge may also include all folios that the CPU's stack and registers
        point to. If these could not be read, it may include this many pages.
    :ivar in_pages: whether *most* and *folios* are in pages even if rows are in bytes
    :ivar in_many_rows: whether one charge may show in any number of rows. Otherwise it shows in
        two: the row of its memcg, and the row of the parent, from which the memcg's counter is
        subtracted.
    """

    functions: re.Pattern[str]
    most: Callable[[Snapshot], int]
    folios: int = 0
    in_pages: bool = False
    in_many_rows: bool = False

    def largest(self, snapshot: Snapshot, cpu: Running) -> int:
        """Return the largest charge that a CPU may have left half done."""
        most = self.most(snapshot)
        if not self.folios:
            return most
        if cpu.pages is None:
            return most + self.folios
        # vm_area_alloc_pages() charges huge pages before it splits them. No page stores their
        # order.
        in_vmalloc = any(map(_IN_VMALLOC.search, cpu.functions))
        return most + cpu.pages + (HUGE if in_vmalloc else 0)
