# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``node_levels``
------------------------

For each node and counter of user pages, page cache or reclaim: the counter of the node is that of
the root memcg on the node, which includes all memcgs. ``mod_lruvec_state()`` changes both.
``lruvec_stat_mod_folio()`` changes only the node for a folio that is not charged, but user folios
and page cache are charged, to the root memcg if to no other. Kernel memory need not be charged: the
identities of nodes compare it with what is found.

Exceptions, by counter:

- ``NR_FILE_PAGES`` of the node also counts the swap cache. The migration of a folio of the swap
  cache moves it at all levels, although memcgs do not count it (``folio_migrate_mapping()``). So
  only the sum over nodes is compared.
- In 6.1 on cgroup v1, ``mem_cgroup_swapout()`` uncharges a folio before it leaves the swap cache.
  So ``NR_SWAPCACHE`` of memcgs only grows.
- NFS clients count in ``NR_WRITEBACK`` of nodes what the server has not committed yet
  (``nfs_folio_mark_unstable()``). If there is one, the node may have more than the root memcg.
- ``NR_HUGETLB`` (6.14) is not compared. ``free_huge_folio()`` subtracts from the node what nobody
  has added: surplus pages that ``gather_surplus_pages()`` gives back, because a process asked for
  more than there is, and up to 7.2 the targets of migrations, of ``UFFDIO_COPY`` and of
  ``memfd_alloc_folio()``. It may fall below 0. Memcgs are not changed: nothing was charged.
- ``NR_FILE_MAPPED``, ``NR_SECONDARY_PAGETABLE`` and those of shadow entries
  (``WORKINGSET_NODES``, ``WORKINGSET_NODERECLAIM``) also count pages and objects that need not be
  charged, and that are not counted here. The counter of the node cannot be less than the root
  memcg's. The rest is taken as not charged.
- ``NR_KMEM`` of a kernel that accounts by node counts nothing but what is charged.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import NODE_LEVELS
from memcg_inspect.checks.identities.levels import why_not_flushed
from memcg_inspect.checks.identities.node_totals import node_unit
from memcg_inspect.checks.node_pages import node_counter, why_not_known
from memcg_inspect.checks.rows import RowKey, doubted, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("AT_LEAST", "CHECK", "EXACT", "node_level_rows")

#: Counters that are changed through a lruvec, for folios on LRU lists and by reclaim.
_OF_LRUVECS = (
    "NR_INACTIVE_ANON",
    "NR_ACTIVE_ANON",
    "NR_INACTIVE_FILE",
    "NR_ACTIVE_FILE",
    "NR_UNEVICTABLE",
    "WORKINGSET_REFAULT_ANON",
    "WORKINGSET_REFAULT_FILE",
    "WORKINGSET_ACTIVATE_ANON",
    "WORKINGSET_ACTIVATE_FILE",
    "WORKINGSET_RESTORE_ANON",
    "WORKINGSET_RESTORE_FILE",
    "PGPROMOTE_SUCCESS",
    "PGDEMOTE_KSWAPD",
    "PGDEMOTE_DIRECT",
    "PGDEMOTE_KHUGEPAGED",
    "PGDEMOTE_PROACTIVE",
    "PGSTEAL_KSWAPD",
    "PGSTEAL_DIRECT",
    "PGSTEAL_KHUGEPAGED",
    "PGSTEAL_PROACTIVE",
    "PGSTEAL_ANON",
    "PGSTEAL_FILE",
    "PGSCAN_KSWAPD",
    "PGSCAN_DIRECT",
    "PGSCAN_KHUGEPAGED",
    "PGSCAN_PROACTIVE",
    "PGSCAN_ANON",
    "PGSCAN_FILE",
    "PGROTATE_ANON",
    "PGROTATE_FILE",
    "PGREFILL",
    "NR_KMEM",
)
#: Counters of folios that are all charged.
_OF_FOLIOS = (
    "NR_ANON_MAPPED",
    "NR_ANON_THPS",
    "NR_FILE_DIRTY",
    "NR_FILE_THPS",
    "NR_SHMEM",
    "NR_SHMEM_THPS",
    "NR_SWAPCACHE",
    "NR_VMSCAN_WRITE",
    "NR_WRITEBACK",
)
#: Counters of folios, pages and objects that need not be charged.
AT_LEAST = (
    "NR_FILE_MAPPED",
    "NR_SECONDARY_PAGETABLE",
    "WORKINGSET_NODERECLAIM",
    "WORKINGSET_NODES",
)
#: Counters whose values for nodes are equal to those of the root memcg.
EXACT = (*_OF_LRUVECS, *_OF_FOLIOS, "NR_FILE_PAGES")
_FILE_PAGES, _SWAPCACHE, _WRITEBACK = "NR_FILE_PAGES", "NR_SWAPCACHE", "NR_WRITEBACK"


def node_level_rows(snapshot: Snapshot) -> list[Row]:
    """Compare counters of nodes with those of the root memcg, where either is not zero."""
    return [row for row in _rows(snapshot) if not row.is_zero]


def _rows(snapshot: Snapshot) -> Iterator[Row]:
    not_charged = _why_not_charged(snapshot)
    for item in snapshot.features.lruvec_items:
        if item not in (*_OF_LRUVECS, *_OF_FOLIOS, *AT_LEAST):
            continue
        reason = not_charged if item in _OF_FOLIOS else None
        if item == _SWAPCACHE and not snapshot.features.default_hierarchy:
            reason = reason or _UNCHARGED_BEFORE
        for nid in snapshot.image.nodes:
            why = why_not_flushed(snapshot, item, [nid]) or reason
            row = doubted(_row(snapshot, item, nid), missing_if(why, either_way=True))
            if item == _WRITEBACK and snapshot.all_nodes.writeback_by_nfs:
                row = doubted(row, missing_if(_UNSTABLE))
            yield row
    if _FILE_PAGES in snapshot.features.lruvec_items:
        why = why_not_flushed(snapshot, _FILE_PAGES, snapshot.image.nodes) or not_charged
        yield doubted(_file_pages(snapshot), missing_if(why, either_way=True))


def _row(snapshot: Snapshot, item: str, nid: int) -> Row:
    node, memcgs = node_counter(snapshot, item, nid), _memcgs(snapshot, item, nid)
    found = {"memcgs": memcgs or 0}
    if item in AT_LEAST and node is not None:
        found["not_charged"] = max(0, sum(node.values()) - found["memcgs"])
    return make_row(
        RowKey("node_levels", item, node_unit(item), nid=nid),
        found,
        None if memcgs is None else node,
        unread=_UNREAD,
    )


def _file_pages(snapshot: Snapshot) -> Row:
    nodes = snapshot.image.nodes
    memcgs = [_memcgs(snapshot, _FILE_PAGES, nid) for nid in nodes]
    parts = [node_counter(snapshot, _FILE_PAGES, nid) for nid in nodes]
    found = {"memcgs": sum(part or 0 for part in memcgs)}
    # Without CONFIG_SWAP there is no swap cache.
    if _SWAPCACHE in snapshot.features.node_items:
        cached = [node_counter(snapshot, _SWAPCACHE, nid) for nid in nodes]
        found["swapcache"] = sum(sum(part.values()) for part in cached if part is not None)
    claimed = None
    if None not in memcgs and None not in parts:
        claimed = {
            name: sum(part[name] for part in parts if part is not None)
            for name in ("vm_stat", "cpu")
        }
    return make_row(RowKey("node_levels", _FILE_PAGES, "pages"), found, claimed, unread=_UNREAD)


_UNCHARGED_BEFORE = (
    "cgroup v1 may have uncharged pages before they left the swap cache (mem_cgroup_swapout())"
)
_UNSTABLE = "pages that NFS servers have not committed may be counted by nodes only"
_UNREAD = "a counter of the node, or of a memcg on it, is not in the image"


def _memcgs(snapshot: Snapshot, item: str, nid: int) -> int | None:
    root = next(iter(snapshot.memcgs))
    claim = snapshot.counters.hierarchical(root, item, nid)
    return None if claim is None else claim.exact


def _why_not_charged(snapshot: Snapshot) -> str | None:
    pages = {} if snapshot.lru is None else snapshot.lru.pages
    if any(number for (payer, _, _), number in pages.items() if not payer):
        return "pages on LRU lists are not charged to any memcg, and only nodes count them"
    return None


CHECK = Check(
    name="node_levels",
    counter="counters of user pages, page cache and reclaim of the node; `NR_KMEM` of the node",
    unit="pages",
    found=(
        "the same counters of the root memcg on the node. `NR_FILE_PAGES` is compared as the sum "
        "of all nodes, with the swap cache. Counters that are 0 on both sides have no row"
    ),
    sources=("memcgs", "swapcache", "not_charged"),
    places=("vm_stat", "cpu"),
    rows=node_level_rows,
    not_kept=why_not_known,
    of_whole_nodes=True,
    counters_only=True,
    half_done=NODE_LEVELS,
)
