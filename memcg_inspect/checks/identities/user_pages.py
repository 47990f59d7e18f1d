# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``user_pages``
-----------------------

For each memcg, and for each node where the kernel promises it: the counters of user pages are the
numbers of pages in these states. ``lruvec_stat_mod_folio()`` changes them for the memcg that a page
is charged to, and for the node of the page.

- ``NR_ANON_MAPPED``, ``NR_FILE_MAPPED``: pages that page tables of processes map, those of
  anonymous memory, and others. The latter include kernel memory that is charged and mapped, such
  as that of BPF maps. ``NR_ANON_THPS``: pages of anonymous folios that some PMD maps as a whole.
- ``NR_FILE_PAGES``: pages in the page cache. ``NR_SHMEM``: those of shmem.
  ``NR_FILE_THPS``, ``NR_SHMEM_THPS``: those of folios that a PMD could map.
- ``NR_FILE_DIRTY``: pages in the page cache that are dirty, of files that are written back.
  ``NR_WRITEBACK``: pages that are being written.
- ``NR_SWAPCACHE``: pages in the swap cache.
- ``NR_HUGETLB``: pages of hugetlb that are charged.

What the kernel does not promise is not compared:

- the node of ``NR_FILE_PAGES``: the migration of a folio of the swap cache moves it from one node
  to the other, although memcgs do not count it (``folio_migrate_mapping()``). That of
  ``NR_FILE_THPS`` and ``NR_SHMEM_THPS``: a migration does not move the first, and up to 6.4 neither
  the second ("mm: fix shmem THP counters on migration"). No type came with that: the node of the
  second is compared on kernels whose user pages point to obj_cgroups (7.1). That of ``NR_HUGETLB``:
  kernels without ``move_hugetlb_lruvec_stat()`` do not move it either;
- on kernels whose user pages point to memcgs (up to 7.0), the root memcg: its pages are not
  charged. But a migration changes its counters of nodes;
- on cgroup v1, ``NR_SWAPCACHE``: ``mem_cgroup_swapout()`` uncharged a folio before it left the swap
  cache; and ``NR_FILE_THPS`` and ``NR_SHMEM_THPS``: ``mem_cgroup_move_account()``, up to 6.13, did
  not move them with a folio;
- on kernels up to 6.19, a difference of ``NR_FILE_PAGES`` or ``NR_SHMEM`` is no finding if pages
  were put together to huge pages: ``collapse_file()`` did not move what old pages counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import FLUSH, LRU, HalfDone, folio_pages, pattern
from memcg_inspect.checks.identities.levels import why_not_flushed
from memcg_inspect.checks.rows import Missing, RowKey, counter_row, doubted, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "ITEMS", "has_nodes", "kept_items", "user_page_rows")

#: Counters that are compared by node.
_BY_NODE = (
    "NR_ANON_MAPPED",
    "NR_FILE_MAPPED",
    "NR_ANON_THPS",
    "NR_SHMEM",
    "NR_FILE_DIRTY",
    "NR_WRITEBACK",
    "NR_SWAPCACHE",
)
_SHMEM_THPS = "NR_SHMEM_THPS"
ITEMS = (*_BY_NODE, "NR_FILE_PAGES", _SHMEM_THPS, "NR_FILE_THPS", "NR_HUGETLB")
#: Counters that the kernel does not promise on cgroup v1.
_NOT_ON_V1 = frozenset(("NR_SWAPCACHE", "NR_SHMEM_THPS", "NR_FILE_THPS"))
_OF_FILES = frozenset(("NR_FILE_PAGES", "NR_SHMEM"))
_COLLAPSED = (
    "pages were put together to huge pages, which this kernel may have counted for other memcgs "
    "(collapse_file())"
)
#: Functions that change the state of a folio, in addition to those of the LRU, as regular
#: expressions.
_STATE = (
    r"set_pte|set_page_dirty|mark_buffer_dirty|\w*_dirty_|clear_page_dirty|write_cache_pages"
    r"|do_writepages|write\w*_folio|writepage|end_\w*writeback|start_\w*writeback|end_swap_bio"
    r"|end_bio|bio_endio|end_buffer|iomap_|blkdev_|block_|generic_perform_write|page_add_|page_remove"
    r"|do_set_p|do_huge_pmd|copy_p[mtu4]\w+_range|copy_page_range|copy_huge|insert_page|vm_insert"
    r"|change_p|collapse_|khugepaged|try_to_unmap|try_to_migrate|rmap_walk|set_pmd|do_fault_around"
    r"|mem_cgroup_migrate|memcg_migrate|ksm_|replace_page|secretmem_|invalidate_"
    r"|alloc_hugetlb_folio|free_huge_(folio|page)|hugetlb_(no_page|fault|wp)"
)


def user_page_rows(snapshot: Snapshot) -> list[Row]:
    """Compare pages with the counters of user pages, where either is not zero."""
    found, is_zero = _found(snapshot), snapshot.counters.is_zero
    rows = []
    for item in kept_items(snapshot):
        nids = snapshot.image.nodes if has_nodes(snapshot, item) else (None,)
        for nid in nids:
            missing, doubt = _missing(snapshot, item, nid), _doubt(snapshot, item, nid)
            for memcg in snapshot.live():
                if memcg.parent is None and not snapshot.features.lru_holds_objcg:
                    continue
                number = found.get((memcg.address, nid, item), 0)
                if missing is None and not number and is_zero(memcg.address, item, nid):
                    continue
                key = RowKey("user_pages", item, "pages", memcg.address, nid)
                row = counter_row(snapshot, key, {"pages": number}, missing)
                rows.append(doubted(row, doubt))
    return [row for row in rows if not row.is_zero]


def kept_items(snapshot: Snapshot) -> Collection[str]:
    """Return the counters that are compared on this kernel."""
    features = snapshot.features
    left_out = frozenset() if features.default_hierarchy else _NOT_ON_V1
    return [item for item in ITEMS if item in features.items and item not in left_out]


def has_nodes(snapshot: Snapshot, item: str) -> bool:
    """Return whether a counter is compared by node; else, the sum over nodes is."""
    return item in _BY_NODE or (item == _SHMEM_THPS and snapshot.features.lru_holds_objcg)


def _found(snapshot: Snapshot) -> Counter[tuple[int, int | None, str]]:
    found: Counter[tuple[int, int | None, str]] = Counter()
    for (payer, nid, item), pages in snapshot.user_pages.pages.items():
        memcg = snapshot.payer(payer)
        if memcg is not None:
            found[memcg, nid if has_nodes(snapshot, item) else None, item] += pages
    return found


def _missing(snapshot: Snapshot, item: str, nid: int | None) -> Missing | None:
    why = snapshot.why_missing("lru", None, nid)
    if why is None and item == "NR_FILE_MAPPED":
        why = snapshot.why_missing("kmem", None, nid)
    if why is None and not snapshot.complete("user_pages"):
        why = "files of dirty pages, or parts of large folios, are not all in the image"
    return missing_if(why)


def _doubt(snapshot: Snapshot, item: str, nid: int | None) -> Missing | None:
    nids = snapshot.counters.nids if nid is None else (nid,)
    why = why_not_flushed(snapshot, item, nids)
    if why is None and item in _OF_FILES and snapshot.user_pages.may_have_collapsed_files:
        why = _COLLAPSED
    return missing_if(why, either_way=True)


def _not_kept(snapshot: Snapshot) -> str | None:
    return None if kept_items(snapshot) else "this kernel keeps no counter of user pages by memcg"


CHECK = Check(
    name="user_pages",
    counter=(
        "`NR_ANON_MAPPED`, `NR_FILE_MAPPED`, `NR_ANON_THPS`, `NR_SHMEM`, `NR_FILE_DIRTY`, "
        "`NR_WRITEBACK`, `NR_SWAPCACHE`, `NR_SHMEM_THPS` (7.1), by node; `NR_FILE_PAGES`, "
        "`NR_FILE_THPS`, `NR_HUGETLB`"
    ),
    unit="pages",
    found=(
        "pages in the state that the counter is about. Counters that are 0 on both sides have no "
        "row"
    ),
    sources=("pages",),
    places=("folded", "pending_cpu"),
    rows=user_page_rows,
    items=ITEMS,
    not_kept=_not_kept,
    half_done=HalfDone(
        pattern(LRU, _STATE, FLUSH),
        lambda snapshot: snapshot.limits.folio_batch + 1,
        folios=folio_pages,
        kinds=["folio", "batch", "kmem"],
        # A folio that enters or leaves a file counts in several; a migration changes two nodes.
        rows=8,
    ),
)
