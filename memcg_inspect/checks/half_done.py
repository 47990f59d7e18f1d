# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Half-done charges
-----------------

The kernel functions that make a charge, and the largest possible charge. A charge changes several
counters and pointers, one after the other. A CPU that was stopped in such a function may have
changed one of them and not yet another. :mod:`memcg_inspect.checks.inflight` uses this to explain
rows that differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import NUMA_NO_NODE, Address, Held, HeldKind, Running, Unit
from memcg_inspect.report import Row

__all__ = (
    "BETWEEN",
    "CGROUP",
    "CHARGING",
    "COUNTING",
    "FLUSH",
    "FOLD",
    "HUGETLB",
    "LEVEL",
    "LRU",
    "PAGES",
    "PAGETABLE",
    "PERCPU",
    "SLAB",
    "SLEEPS",
    "SOCK",
    "STACK",
    "THROTTLING",
    "VMALLOC",
    "FREE",
    "LEVELS",
    "MLOCK",
    "NODE",
    "NODE_LEVELS",
    "NODE_TOTALS",
    "ZONE",
    "ZONE_COUNTERS",
    "ZSMALLOC",
    "OBJCG",
    "OBJECT_KINDS",
    "HalfDone",
    "batch_pages",
    "block_pages",
    "charge_batches",
    "folio_pages",
    "is_nearest_page",
    "largest_kmem",
    "largest_object",
    "name_of",
    "pattern",
    "slab_amounts",
    "stock_bytes",
    "stock_pages",
)

# How the names of functions begin, as regular expressions. Leading underscores are not part of
# them: "kfree" stands for __kfree_skb() as well.
_CHARGE = r"(obj_cgroup|objcg|memcg|mem_cgroup|page_counter)_\w*charge|try_charge|charge_memcg"
_STOCK = r"(refill|drain|consume|account)_(\w+_)?stock|drain_local_|drain_all_stock"
_STAT = r"mod_(objcg|memcg|lruvec|node)_\w*stat|lruvec_stat_mod|mod_objcg_mlstate|account_"
_BOOKED = f"{_CHARGE}|{_STOCK}|{_STAT}|uncharge_(folio|batch|list)|commit_charge"
SLAB = (
    rf"{_BOOKED}|slab_|kmem_cache_|kmalloc|krealloc|kfree|kvfree|kvmalloc|kmem_alloc|memcg_slab_"
    r"|memcg_alloc_abort|allocate_slab|new_slab|free_slab|cache_from_obj|refill_sheaf|memcg_free"
    r"|rcu_free_sheaf|free_large_kmalloc|obj_cgroup_|free_to_pcs|build_detached_freelist"
)
PAGES = (
    rf"{_BOOKED}|alloc_(frozen_)?pages|alloc_pages_|get_free_page|free_(the_|frozen_)?page"
    r"|free_unref|free_pcppages|get_page_from_freelist|memcg_kmem_|split_page|pagetable_|put_page"
    r"|(pte|pmd|pud|p4d|pgd)_(alloc|free|ctor|dtor)|pte_lockptr|tlb_|free_pgtables|exit_mmap|mmput"
    r"|folios?_put|release_pages|free_pages_and_swap|folio_alloc|put_and_free_page"
)
STACK = (
    r"dup_task_struct|alloc_thread_stack|free_thread_stack|thread_stack_|release_task_stack"
    r"|put_task_stack|account_kernel_stack|memcg_charge_kernel_stack|vfree|vmalloc|copy_process"
    r"|put_task_struct|free_task|delayed_put_task|finish_task_switch|exit_task_stack_account"
)
VMALLOC = rf"{_STAT}|vmalloc|vfree|vm_area_|vmap|delayed_vfree|kvmalloc|kvfree|free_vm_area"
LRU = (
    rf"{_BOOKED}|folio|lru_|lru(vec)?_|do_anonymous_page|do_(cow|read|shared)_fault|do_fault"
    r"|wp_page_copy|do_wp_page|do_swap_page|finish_fault|unmap_|zap_|tlb_|release_pages|put_pages?_"
    r"|free_pages_and_swap|isolate_|move_(folios|pages)|shrink_|evict_folios|split_huge|split_folio"
    r"|collapse_|(un)?map_anon_folio|filemap_|page_cache_|truncate_|shmem_|migrate_"
    r"|mem_cgroup_(?!handle_over_high)|exit_mmap|mmput|remove_migration|activate_|pagevec_"
    r"|put_page|swap_|read_pages|delete_from"
)
SOCK = (
    r"sk_|skb_|kfree_skb|consume_skb|alloc_skb|napi_|tcp_|udp_|udpv6_|sctp_|mptcp_|sock_|socket_"
    r"|inet_|inet6_|unix_|release_sock|lock_sock|mem_cgroup_(sk|charge_skmem|uncharge_skmem)"
    r"|ip_|ip6_|raw_|rawv6_|tls_|net_rx_action|process_backlog|packet_"
)
CGROUP = (
    r"cgroup_|cgroup1_|css_|copy_process|do_exit|mem_cgroup_css|memcg_(off|on)line|memcg_reparent"
    r"|mem_cgroup_(alloc|free|attach|fork|exit|move)|reparent_|obj_cgroup_|current_obj_cgroup"
    r"|bpf_(map|mem|prog|obj|ma|local_storage|selem|link)_|sys_bpf|bpf$|map_create|map_alloc\w*"
    r"|percpu_ref_|htab_map_|unit_(alloc|free)|alloc_bulk|free_bulk|free_task|put_task_struct"
    r"|delayed_put_task|mem_cgroup_id"
)
PERCPU = rf"{_CHARGE}|{_STOCK}|{_STAT}|pcpu_|alloc_percpu|free_percpu|percpu_create"
#: Functions that charge bytes to obj_cgroups. They charge whole pages first. pcpu_alloc() clears
#: the memory of all CPUs before pcpu_memcg_post_alloc_hook() records its owner.
OBJCG = rf"{SLAB}|{PERCPU}|zswap"
#: Functions that charge or uncharge memory to memcgs. Each is called from another file of the
#: kernel, or calls one that is.
CHARGING = (
    rf"{_CHARGE}|{_STOCK}|mod_memcg_(page_)?state|memcg_account_kmem|uncharge_(folio|batch|list)"
    r"|commit_charge|mem_cgroup_(migrate|replace|move|swapout)|memcg1?_(swapout|slab|hotplug|move)"
    r"|obj_cgroup_|pcpu_memcg_"
)
#: Functions that obj_cgroup_charge_pages() and obj_cgroup_uncharge_pages() call when they may have
#: changed one of the page counter and MEMCG_KMEM, and not yet the other.
BETWEEN = (
    r"page_counter_\w*charge|(refill|drain|consume)_stock|mod_memcg_(page_)?state|memcg_account"
)
#: try_charge_memcg() lets a task that exceeds memory.high sleep when it has charged the pages.
THROTTLING = r"mem_cgroup_handle_over_high"
#: Functions that change a counter of a memcg and the same one of its node, or that of the node and
#: that of a memcg, one after the other. Each is a function of its own in Linux 6.1 to 7.3, or is
#: part of another one here: without debugging information, stacks do not show inlined functions.
LEVEL = r"mod_(memcg_)?lruvec_(page_|kmem_)?state|lruvec_stat_mod_folio"
#: Functions that add to a counter of a node. What exceeds the CPU's threshold goes from its
#: vm_node_stat_diff to vm_stat of the node, and to vm_node_stat. See node_page_state_add().
NODE = r"(mod|inc|dec)_node_(page_)?state"
#: The same of zones: ``zone.vm_stat`` and ``vm_zone_stat``. See zone_page_state_add().
ZONE = r"(mod|inc|dec)_zone_(page_)?state"
#: Functions that change lists of free pages, with zone->lock.
FREE = (
    r"alloc_(frozen_)?pages|alloc_pages_|get_page_from_freelist|rmqueue|free_(one_page|pcppages)"
    r"|free_(the_|frozen_)?page|free_unref|free_pages_ok|drain_|unreserve_highatomic|isolate_"
    r"|compact_|take_page_off_buddy|(set|unset)_migratetype|undo_isolate|page_reporting"
    r"|accept_page|split_free_page"
)
#: Functions that set or clear PG_mlocked, or that call those that do, where these are inlined.
MLOCK = (
    r"mlock|munlock|apply_vma_lock|folio_batch_move_lru|lru_add|(folios|pages)?_?put_|release_pages"
    r"|folios?_put|free_pages_(prepare|and_swap)|free_unref|free_(frozen_)?pages|page_cache_release"
    r"|lru_cache|unmap_|zap_|try_to_|remove_rmap|page_remove_rmap|folio_remove_rmap|do_anonymous"
    r"|wp_page_copy|do_swap_page|finish_fault|migrate_|remove_migration|split_huge|tlb_|exit_mmap"
)
#: Functions that allocate, free or migrate pages of zsmalloc, and those that isolate them.
ZSMALLOC = (
    r"zs_|alloc_z(s|p)|free_z(s|p)|zspage|zpdesc|async_free_zspage|zswap|zram|isolate_mov|migrate_"
    r"|compact_|kcompactd|putback_mov"
)
#: Functions that make or free page tables, or that call those that do, where these are inlined.
PAGETABLE = (
    r"pagetable_|(pte|pmd|pud|p4d|pgd|pgtable)_\w*(alloc|free|install|ctor|dtor)|free_p[gmu4]d_"
    r"|tlb_remove_table|zap_huge_|zap_deposited_|collapse_|retract_page_tables|kernel_pgtable_"
)
#: Functions that count them. Where functions that make or free them are inlined into do_fault(),
#: copy_huge_pmd() or alloc_pte_page(), their names are not on the stack.
COUNTING = rf"{LEVEL}|{NODE}"
#: Up to Linux 6.13 it charges a huge page first, then looks for one, which it may have to allocate.
HUGETLB = r"alloc_hugetlb_folio"
#: Functions that sleep while a charge of pages is half done.
SLEEPS = rf"{THROTTLING}|{HUGETLB}"
#: What is charged in bytes.
OBJECT_KINDS: tuple[HeldKind, ...] = ("object", "cache", "zswap", "percpu")
#: mem_cgroup_css_rstat_flush() moves amounts from one place to the next, one counter at a time.
#: css_release_work_fn() takes a memcg off the list of children before it flushes its counters.
FLUSH = (
    r"mem_cgroup_css_rstat_flush|mem_cgroup_stat_aggregate|flush_nmi_stats|css_release_work_fn"
    r"|(css|cgroup)_rstat_flush"
)

#: Functions that move what one CPU has in vm_node_stat_diff, one counter after the other. They add
#: to vm_node_stat after all nodes.
FOLD = (
    r"refresh_cpu_vm_stats|fold_diff|cpu_vm_stats_fold|quiet_vmstat|vmstat_update|refresh_vm_stats"
)
#: Functions that count a folio in NR_FILE_PAGES of the node only, and in NR_SWAPCACHE of both, or
#: that move it from one node to another.
_SWAPCACHE = r"swap_cache_|(add_to|delete_from)_swap_cache|folio_migrate_mapping"

#: The most that is in vm_node_stat_diff, which is an s8, and that mod_node_state() moves in
#: addition: half of a threshold.
_MOST_DIFF = 128 + 64
_FLUSHES = re.compile(FLUSH)
_FOLDS = re.compile(rf"_*({FOLD})")
_ADDS_TO_NODE = re.compile(rf"_*({NODE}|{FOLD})")
_ADDS_TO_ZONE = re.compile(rf"_*({ZONE}|{FOLD})")
_IN_HUGETLB = re.compile(rf"_*({HUGETLB})")
_IN_VMALLOC = re.compile(r"_*(vmalloc|vm_area_alloc_pages)")


def pattern(*parts: str) -> re.Pattern[str]:
    """
    Return a pattern that matches the names of functions that begin with any of these parts.

    Underscores before a name, and the prefixes of system calls, are not part of it.
    """
    return re.compile(rf"(?:__[a-z0-9]+_sys_|_*)(?:{'|'.join(parts)})")


def largest_object(snapshot: Snapshot) -> int:
    """Return the most bytes of one slab object, and of those that a stock holds back."""
    return snapshot.limits.slab_object + snapshot.limits.slab_stock


def block_pages(snapshot: Snapshot) -> int:
    """Return the pages of the largest block that the page allocator returns."""
    return snapshot.limits.block


def folio_pages(snapshot: Snapshot) -> int:
    """Return the pages of a batch of the largest folios."""
    return snapshot.limits.folio_batch * snapshot.limits.block


def largest_kmem(snapshot: Snapshot) -> int:
    """Return the most pages of kernel memory in one charge that is no block of pages."""
    # A stack without CONFIG_VMAP_STACK, or a PGD, which do not store their order; the largest
    # object; and what the stock of objects uncharges.
    image, limits = snapshot.image, snapshot.limits
    size = max(2 * limits.stack, limits.slab_object, limits.percpu) + limits.slab_stock
    return -(-size // image.page_size)


def batch_pages(snapshot: Snapshot) -> int:
    """Return the pages that are charged at once, and the single pages of a folio_batch."""
    # try_charge_memcg() charges a batch in advance, or what is asked for if that is more.
    limits = snapshot.limits
    return max(limits.charge_batch, largest_kmem(snapshot)) + limits.folio_batch


def charge_batches(snapshot: Snapshot, cpu: Running) -> Iterator[int]:
    """
    Return the pages that try_charge_memcg() charges in advance, and those in the CPU's stocks.

    drain_stock() uncharges these before it empties the slot. And those of the huge page for which
    alloc_hugetlb_folio() has charged, and which it looks for.
    """
    yield snapshot.limits.charge_batch
    if any(map(_IN_HUGETLB.match, cpu.functions)):
        yield from snapshot.limits.hugetlb
    for stock in snapshot.charge_stocks:
        if stock.cpu == cpu.cpu:
            yield stock.nr_pages
    yield from stock_pages(snapshot, cpu)


def stock_bytes(snapshot: Snapshot, cpu: Running) -> Iterator[int]:
    """
    Return the bytes in the CPU's object stock, and the slab bytes that it holds back.

    drain_obj_stock() books them before it clears them.
    """
    for stock in snapshot.stocks:
        if stock.cpu == cpu.cpu:
            yield from (stock.nr_bytes, abs(stock.reclaimable), abs(stock.unreclaimable))


def slab_amounts(snapshot: Snapshot, cpu: Running) -> Iterator[int]:
    """
    Return the slab bytes that a CPU may move from its object stock to the counters.

    __account_obj_stock() does so when they exceed a page, and clears them first.
    """
    yield from stock_bytes(snapshot, cpu)
    yield from cpu.numbers


def stock_pages(snapshot: Snapshot, cpu: Running) -> Iterator[int]:
    """Return the whole pages in the CPU's object stock, which drain_obj_stock() uncharges."""
    for size in stock_bytes(snapshot, cpu):
        yield size // snapshot.image.page_size


def _none(snapshot: Snapshot, cpu: Running) -> Iterable[int]:
    return ()


@dataclass(frozen=True)
class HalfDone:
    """
    How one charge of an identity is made.

    :ivar functions: pattern of functions that make such a charge
    :ivar most: returns the largest charge, in the unit of the identity's rows
    :ivar folios: if given, a charge may also include all pages that the CPU's stack and registers
        point to; it returns the most pages of such a charge if these could not be read
    :ivar vmalloc: whether such a charge may be of a vmalloc area, if *folios* is given
    :ivar entries: if given, rows in pages count entries, and this is the most of them in a charge
    :ivar of_held: whether what is charged remains on the stack meanwhile. If something of *kinds*
        is there, *most* is the largest of it
    :ivar in_pages: whether *most* is in pages even if rows are in bytes
    :ivar rows: the most rows in which one charge shows: that of its memcg, and that of an
        ancestor, from whose counter the memcg's is subtracted
    :ivar in_many_rows: whether one charge shows in the rows of all ancestors
    :ivar kinds: kinds of :class:`~memcg_inspect.model.Held` whose charge shows in the rows; pages
        by default
    :ivar details: :attr:`~memcg_inspect.model.Held.detail` by item of the row, of objects
    :ivar amounts: returns amounts that the functions move whatever they charge, in the unit of
        *most*
    :ivar modulo: whether rows differ by the rest of a charge from whole pages
    :ivar unpaid: whether nobody pays for an object or a folio while its charge is half done:
        counters are charged before its owner is set, and uncharged after the owner is cleared.
        Only __memcg_kmem_uncharge_page() clears it last, and zswap_entry_free() never does.
    :ivar only_in: if given, functions that begin and end such a charge. A task that is in none of
        them has left none half done. See :mod:`memcg_inspect.checks.charging`
    :ivar only_at: functions that do so only if no other of *functions* is further in
    :ivar shows_in: items of rows in which a charge of kernel memory shows, too
    :ivar of_nodes: whether rows compare counters of nodes, which CPUs fold
    :ivar of_zones: whether rows compare counters of zones, which CPUs fold together with those
    :ivar areas: if given, rows count pages of vmalloc areas, which a task may be counting or
        freeing; it returns the most by which that may change a row, of a subtree or not, in pages
    :ivar subject: returns what a CPU must point to if the row is not about a memcg; ``None`` for a
        row that any CPU can change
    """

    functions: re.Pattern[str]
    most: Callable[[Snapshot], int]
    folios: Callable[[Snapshot], int] | None = None
    vmalloc: bool = False
    entries: int | None = None
    of_held: bool = False
    in_pages: bool = False
    rows: int = 2
    in_many_rows: bool = False
    kinds: Collection[HeldKind] = ("kmem", "folio", "batch")
    details: Collection[tuple[str, str]] = ()
    amounts: Callable[[Snapshot, Running], Iterable[int]] = _none
    modulo: bool = False
    unpaid: bool = False
    only_in: re.Pattern[str] | None = None
    only_at: re.Pattern[str] | None = None
    shows_in: tuple[str, ...] = ()
    of_nodes: bool = False
    of_zones: bool = False
    areas: Callable[[Snapshot, Running, Row, bool], int] | None = None
    subject: Callable[[Snapshot, Row], Address | None] | None = None

    def place(self, cpu: Running) -> str | None:
        """Return the innermost function of a CPU that makes such a charge."""
        return next((f for f in cpu.functions if self._is_place(f)), None)

    def _is_place(self, function: str) -> bool:
        return self._adds(function) or self.functions.match(function) is not None

    def _adds(self, function: str) -> bool:
        """Return whether a function adds to counters of nodes or zones, if rows compare these."""
        to_node = self.of_nodes and _ADDS_TO_NODE.match(function) is not None
        return to_node or (self.of_zones and _ADDS_TO_ZONE.match(function) is not None)

    def is_in(self, cpu: Running) -> bool:
        """Return whether a CPU may have begun such a charge, and not ended it."""
        if self.only_in is None or any(map(self.only_in.match, cpu.functions)):
            return True
        return self.only_at is not None and self.only_at.match(self.place(cpu) or "") is not None

    def _is_adding(self, cpu: Running) -> bool:
        return any(map(self._adds, cpu.functions))

    def flushes(self, cpu: Running) -> bool:
        """Return whether a CPU was flushing counters, which changes many of them by any amount."""
        return any(_FLUSHES.match(f) and self.functions.match(f) for f in cpu.functions)

    def folds(self, cpu: Running) -> bool:
        """Return whether a CPU was moving its part of many counters of nodes and zones."""
        return (self.of_nodes or self.of_zones) and any(map(_FOLDS.match, cpu.functions))

    def largest(self, snapshot: Snapshot, cpu: Running, row: Row) -> int:
        """Return the largest charge that a CPU may have left half done, in the unit of the row."""
        if cpu.held and self.flushes(cpu):
            # What CPUs have not flushed yet can be of any size.
            return abs(row.off)
        areas = 0 if self.areas is None else self.areas(snapshot, cpu, row, self.in_many_rows)
        return self._charge(snapshot, cpu, row) + self._diff(snapshot, cpu, row) + areas

    def _diff(self, snapshot: Snapshot, cpu: Running, row: Row) -> int:
        """Return the most of a counter of nodes or zones that a CPU may have moved only half."""
        unknown = cpu.held is None or not cpu.functions
        if not (self.of_nodes or self.of_zones) or not (unknown or self._is_adding(cpu)):
            return 0
        if row.nid is not None or not (unknown or self.folds(cpu)):
            return _MOST_DIFF
        all_of = snapshot.zones.zones if self.of_zones else snapshot.image.nodes
        return _MOST_DIFF * max(1, len(all_of))

    def _charge(self, snapshot: Snapshot, cpu: Running, row: Row) -> int:
        """Return the largest charge itself, in the unit of the row."""
        counts = any(map(self.functions.match, cpu.functions))
        if self._is_adding(cpu) and not counts:
            return 0  # it was counting something else
        if self.entries is not None and row.unit == "pages":
            return self.entries
        sizes = [h.bytes for h in cpu.held or () if h.kind in self.kinds] if self.of_held else []
        if sizes:
            return max(sizes)
        page = snapshot.image.page_size if row.unit == "bytes" else 1
        most = max(self.most(snapshot), *self.amounts(snapshot, cpu), 0)
        most *= page if self.in_pages else 1
        if self.folios is None:
            return most
        if cpu.held is None:
            return most + self.folios(snapshot) * page
        size = sum(h.bytes for h in cpu.held if h.kind in ("folio", "kmem"))
        if self.vmalloc and any(map(_IN_VMALLOC.match, cpu.functions)):
            # vm_area_alloc_pages() charges huge pages before it splits them. No page stores their
            # order.
            most += snapshot.limits.block * page
        return most + size // snapshot.image.page_size * page

    def fits(self, held: Held, row: Row, page_size: int) -> bool:
        """
        Return whether the half-done charge of what a CPU points to is what a row is off by.

        Memcgs are not compared here.
        """
        if held.kind not in self.kinds or not held.bytes:
            return False
        if self.unpaid and held.payer and held.kind not in ("kmem", "batch", "zswap"):
            return False
        # The node of an obj_cgroup may be another than that of its objects.
        if row.objcg is None and row.nid is not None and held.nid not in (row.nid, NUMA_NO_NODE):
            return False
        if self.details and (row.item, held.detail) not in self.details:
            return False
        if self.modulo:
            return self.is_off_by(row, held.bytes, page_size)
        return _shows_as(held.bytes, abs(row.off), row.unit, page_size)

    def is_off_by(self, row: Row, amount: int, page_size: int) -> bool:
        """Return whether a row differs by an amount, in the unit of *most*."""
        off = abs(row.off)
        if self.modulo:
            return (off - amount) % page_size == 0 or (off + amount) % page_size == 0
        in_pages = self.in_pages and row.unit == "bytes"
        return off == amount * (page_size if in_pages else 1)


def _shows_as(size: int, amount: int, unit: Unit, page_size: int) -> bool:
    """
    Return whether a charge of so many bytes can show as an amount in another unit.

    obj_cgroup_charge() rounds pages up. What is left goes to a stock or to nr_charged_bytes. From
    then on only the bytes themselves are missing from what was found; see :func:`is_nearest_page`.
    """
    if unit == "pages":
        return amount == -(-size // page_size) or is_nearest_page(size, amount, page_size)
    return amount == {"references": 1, "KiB": size // 1024, "bytes": size}[unit]


def name_of(cpu: Running) -> str:
    """Return which CPU and task it is, or which task was on no CPU."""
    if cpu.pid < 0:
        return "a task that cannot be read" if cpu.waiting else f"CPU {cpu.cpu}"
    if cpu.waiting:
        return f"{cpu.comm} ({cpu.pid}), which was not running"
    return f"CPU {cpu.cpu} ({cpu.comm}, {cpu.pid})"


def is_nearest_page(size: int, pages: int, page_size: int) -> bool:
    """Return whether rows, which round what was found, lack so many pages if bytes are missing."""
    return 2 * abs(pages * page_size - size) <= page_size


#: Counters of pages that the kernel keeps at several levels, and changes one after the other.
LEVELS = HalfDone(pattern(LEVEL, FLUSH), block_pages)
#: The same of nodes.
NODE_LEVELS = HalfDone(pattern(LEVEL, NODE, _SWAPCACHE, FLUSH), block_pages, of_nodes=True)
#: Those of nodes, and of all nodes.
NODE_TOTALS = HalfDone(pattern(NODE), block_pages, of_nodes=True)
#: Those of zones, and of all zones.
ZONE_COUNTERS = HalfDone(pattern(ZONE), block_pages, of_zones=True)
