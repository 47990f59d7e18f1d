# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What was half done
------------------

A kernel that crashed, or a machine that was stopped, left each CPU in the middle of
something: at most one charge for each of them may be booked in one place and not yet in
another. A difference is shown as ``in-flight``, and is no finding, if CPUs were in functions
that make such charges, and if it is no more than one charge for each of those CPUs; or, for
references, if things that were being freed may hold as many.

A machine whose CPUs all rested left nothing half done: there nothing is explained this way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Row, Running, counted

__all__ = ("mark_in_flight",)


class Charge(NamedTuple):
    """
    How one charge of an identity is made.

    :ivar functions: where a CPU that makes one is
    :ivar most: the largest one, in the unit of the identity's rows
    :ivar folios: if, beyond that, all pages may be in it that the CPU's stack points to: how many
        where that is not known; else 0
    """

    functions: re.Pattern[str]
    most: Callable[[Snapshot], int]
    folios: int = 0

    def largest(self, snapshot: Snapshot, cpu: Running) -> int:
        """Return the most that a CPU may have left half done."""
        most = self.most(snapshot)
        if not self.folios:
            return most
        if cpu.pages is None:
            return most + self.folios
        # vmalloc()'s huge pages are charged before they are split, and tell no order.
        in_vmalloc = any(map(_IN_VMALLOC.search, cpu.functions))
        return most + cpu.pages + (_HUGE if in_vmalloc else 0)


_SLAB = r"slab|kmem_cache|kmalloc|kfree|kvfree|obj_cgroup|objcg|sheaf|obj_stock"
_PAGES = (
    r"alloc_pages|free_pages|free_unref|get_page|memcg_kmem|_charge|_uncharge|pagetable|p[gmtu4]d_"
)
_STACK = (
    r"dup_task_struct|copy_process|thread_stack|release_task_stack|put_task_stack|vfree|vmalloc"
)
_VMALLOC = r"vmalloc|vfree|vm_area|vmap"
_IN_VMALLOC = re.compile(r"vmalloc|vm_area_alloc_pages")
_LRU = r"folio|lru|_charge|_uncharge|do_anonymous_page|wp_page_copy|unmap|tlb_"
_SOCK = r"sk_|skb|tcp_|udp_|sock_|inet_|unix_"
_CGROUP = r"cgroup|css_|copy_process|do_exit|mem_cgroup|bpf_|map_create|map_alloc|percpu_ref|rcu_"
#: A flush moves counters from one place to the next, one at a time.
_FLUSH = r"rstat_flush|flush_memcg_stats|stat_aggregate"


def _pattern(*parts: str) -> re.Pattern[str]:
    return re.compile("|".join(parts))


#: ``MEMCG_CHARGE_BATCH``, and the folios of a batch that are uncharged together.
_CHARGE_BATCH, _FOLIO_BATCH = 64, 31
#: Pages of a huge page, the largest that goes through a batch; and of a stack, twice.
_HUGE, _BLOCK = 512, 8

_CHARGES: dict[str, Charge] = {
    # Larger objects than two pages are no slab objects.
    "slab": Charge(_pattern(_SLAB, _FLUSH), lambda s: 2 * s.image.page_size + 8),
    "objcg_bytes": Charge(_pattern(_SLAB, r"pcpu_|percpu", r"zswap"), lambda s: s.image.page_size),
    # PCPU_MIN_UNIT_SIZE on each CPU, and the vector.
    "percpu": Charge(_pattern(r"pcpu_|percpu", _FLUSH), lambda s: (32 << 10) * (s.image.cpus + 4)),
    "kernel_stack": Charge(_pattern(_STACK, _FLUSH), lambda s: 64),
    "pagetable": Charge(_pattern(_PAGES, r"exit_mm|mmput|tlb_", _FLUSH), lambda s: 2),
    "vmalloc": Charge(_pattern(_VMALLOC, _FLUSH), lambda s: 2 * _HUGE),
    # Small blocks may tell no order, either: stacks without CONFIG_VMAP_STACK, PGDs.
    "kmem": Charge(
        _pattern(_SLAB, _PAGES, _STACK, _VMALLOC, _FLUSH), lambda s: _BLOCK, folios=2 * _HUGE
    ),
    "zswap": Charge(_pattern(r"zswap|zs_|swap_", _FLUSH), lambda s: s.image.page_size),
    "sock": Charge(_pattern(_SOCK, _FLUSH), lambda s: _CHARGE_BATCH),
    "usage": Charge(
        _pattern(_SLAB, _PAGES, _STACK, _VMALLOC, _LRU, _SOCK),
        # What one goes over the batch, and single pages of a batch that is no longer a stack's.
        lambda s: _CHARGE_BATCH + _FOLIO_BATCH,
        folios=_FOLIO_BATCH * _HUGE,
    ),
    "levels": Charge(_pattern(_SLAB, _FLUSH), lambda s: 2 * s.image.page_size + 8),
    "references": Charge(
        _pattern(_SLAB, _PAGES, _STACK, _VMALLOC, _LRU, _CGROUP), lambda s: _FOLIO_BATCH + 1
    ),
    "reparenting": Charge(_pattern(_CGROUP), lambda s: 1),
    "task_objcg": Charge(_pattern(_CGROUP), lambda s: 1),
    # SWAP_CLUSTER_MAX are taken off a list together.
    "lru": Charge(
        _pattern(_LRU, r"folio_batch|pagevec"),
        lambda s: _FOLIO_BATCH + 1,
        folios=_FOLIO_BATCH * _HUGE,
    ),
    # A huge page that is split up has as many references; without a reference it is as large.
    "alloc_tags": Charge(
        _pattern(_SLAB, _PAGES, _STACK, _VMALLOC, _LRU, r"pcpu_|percpu|alloc|free|split"),
        lambda s: _HUGE,
    ),
}


#: Where the largest charge is pages even if rows are bytes.
_IN_PAGES = ("kmem", "alloc_tags")
#: Frames that a stack has at least if it was unwound: nothing starts in a leaf.
_UNWOUND = 3


def mark_in_flight(snapshot: Snapshot, rows: Sequence[Row]) -> list[Row]:
    """Turn rows that differ, but by no more than was half done, into ``in-flight`` ones."""
    marked = [_freed(snapshot, row) for row in rows]
    busy = [cpu for cpu in snapshot.running if cpu.busy]
    if not busy:
        return marked
    left = Counter(row.identity for row in marked if row.status == "differs")
    return [_half_done(snapshot, row, busy, left) for row in marked]


def _freed(snapshot: Snapshot, row: Row) -> Row:
    """References that things being freed may hold, or may have given back already."""
    difference = row.difference or 0
    transients = snapshot.transients.get(row.objcg or 0, ())
    if row.identity != "references" or row.status != "differs" or difference > len(transients):
        return row
    if difference < 0:
        return row
    what = ", ".join(sorted({f"{t.what} ({t.address:#x})" for t in transients}))
    return _in_flight(
        row, f"what is being freed holds at most {counted(len(transients), 'references')}: {what}"
    )


def _half_done(snapshot: Snapshot, row: Row, busy: Sequence[Running], left: Counter[str]) -> Row:
    # A subtree is off by what one of its members is off by.
    identity = "kmem" if row.identity == "hierarchy" else row.identity
    charge = _CHARGES.get(identity)
    if row.status != "differs" or charge is None:
        return row
    cpus = [cpu for cpu in busy if any(map(charge.functions.search, cpu.functions))]
    # Where registers are not known, or the stack is not in the image, it may have been anywhere.
    cpus += [cpu for cpu in busy if len(cpu.functions) < _UNWOUND and cpu not in cpus]
    unit = snapshot.image.page_size if row.unit == "bytes" and identity in _IN_PAGES else 1
    most = [charge.largest(snapshot, cpu) * unit for cpu in cpus]
    # One charge touches its own memcg, and, by what is taken from it, the parent's share.
    if left[row.identity] > 2 * len(cpus) and row.identity not in ("hierarchy", "references"):
        return row
    if not cpus or abs(row.difference or 0) > sum(most):
        return row
    where = "; ".join(
        f"at most {counted(n, row.unit)} of {_where(cpu, charge.functions)}"
        for n, cpu in zip(most, cpus, strict=True)
    )
    return _in_flight(row, where)


def _where(cpu: Running, functions: re.Pattern[str]) -> str:
    known = [f for f in cpu.functions if functions.search(f)] or [*cpu.functions, "unknown place"]
    return f"CPU {cpu.cpu} ({cpu.comm}, {cpu.pid}), in {known[0]}"


def _in_flight(row: Row, reason: str) -> Row:
    return Row(**{**vars(row), "status": "in-flight", "reason": reason})
