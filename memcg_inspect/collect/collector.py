# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Collecting a snapshot
---------------------

:func:`collect` reads an image with the readers of :mod:`memcg_inspect.linux` and returns a
:class:`~memcg_inspect.checks.snapshot.Snapshot`. The memory map is read by
:mod:`memcg_inspect.collect.ranges`; everything else is small and read here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import replace
from typing import NamedTuple

from drgn import FaultError

from memcg_inspect.checks.ledger import GONE
from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.registry import items_read
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.call_sites import CallSites
from memcg_inspect.collect.clock import Clock
from memcg_inspect.collect.counters import (
    read_counters,
    read_lruvecs,
    read_page_counters,
    read_swap_entries,
    read_usage,
)
from memcg_inspect.collect.elsewhere import map_elsewhere
from memcg_inspect.collect.folds import Folds
from memcg_inspect.collect.hugetlb import read_hugetlb
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.collect.nodes import read_nodes
from memcg_inspect.collect.owners import read_owners
from memcg_inspect.collect.page_uses import (
    CompoundOwners,
    PageUses,
    keep_pages_of_others,
    page_uses,
    uses_of_areas,
)
from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.percpu import add_percpu, percpu_usage
from memcg_inspect.collect.pernode import PerNode, per_node_of
from memcg_inspect.collect.ranges import PassContext, collect_ranges, jobs_of
from memcg_inspect.collect.recover import recover_for_charges, recover_for_percpu
from memcg_inspect.collect.slab_cells import SlabCells
from memcg_inspect.collect.zones import read_zone_counters
from memcg_inspect.collect.zswap import ZswapAdded, ZswapExamples, add_zswap
from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member, has_type
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.linux.kernel.bpf import read_map_references
from memcg_inspect.linux.kernel.cgroup import read_css_refs
from memcg_inspect.linux.kernel.fork import caches_stacks, read_cached_stacks
from memcg_inspect.linux.kernel.sched import caches_objcg, read_tasks
from memcg_inspect.linux.kernel.sched_mm import read_active_memcgs
from memcg_inspect.linux.mm.alloc_tag import why_not_profiled
from memcg_inspect.linux.mm.kfence import kfence_pool
from memcg_inspect.linux.mm.khugepaged import may_have_collapsed_files
from memcg_inspect.linux.mm.memcg_data import charges_node_of_folio, kernel_payers
from memcg_inspect.linux.mm.memcontrol import (
    csses_made_since,
    has_node_objcgs,
    not_accounted,
    on_default_hierarchy,
)
from memcg_inspect.linux.mm.memcontrol_limits import read_limits
from memcg_inspect.linux.mm.memcontrol_move import read_moving
from memcg_inspect.linux.mm.memcontrol_stock import read_charge_stocks, read_obj_stocks
from memcg_inspect.linux.mm.memcontrol_vmstats import (
    StatReader,
    lruvec_items,
    memcg_items,
    node_stat_items,
    reparented_items,
)
from memcg_inspect.linux.mm.memremap import has_user_pages_on_devices
from memcg_inspect.linux.mm.mm_inline import LruReader, Sizes
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_counter import page_counters
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.pernode import accounts_by_node, read_objcg_sets
from memcg_inspect.linux.mm.show_mem import miss_lost_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.mm.swap_cgroup import swap_ids
from memcg_inspect.linux.mm.vmalloc import vm_areas
from memcg_inspect.linux.mm.vmstat import read_node_stats
from memcg_inspect.linux.mm.zswap import ZswapReader, zswap_cursors
from memcg_inspect.linux.net.sock import socket_caches
from memcg_inspect.model import Coverage, LruLists, Memcg, Objcg, ObjStock, PercpuUsage
from memcg_inspect.model_kernel import Features
from memcg_inspect.model_pages import UserPages
from memcg_inspect.model_tasks import CachedStackPage, TaskCharge

__all__ = ("collect", "kept_slabs", "kept_zswap")


def collect(
    image: Image,
    clock: Clock | None = None,
    call_sites: bool = True,
    cells: SlabCells | None = None,
) -> Snapshot:
    """
    Read everything that is checked, except the stacks of CPUs.

    :param clock: measures the steps; if not given, a new one
    :param call_sites: whether to read references to call sites, if the kernel has any. What an
        earlier command has read is returned with them.
    :param cells: if given, all slabs are added to it, and this process does all the reading
    :raises ImageError: if this kernel does not charge kernel memory to memcgs, or its layout is
        unknown
    """
    clock = clock or Clock(image)
    with as_image_errors():
        if cells is not None:
            return _collect(image, clock, call_sites, _More(cells, ZswapExamples()))
        # What is kept of slabs is of this process only.
        if image.pool is not None or jobs_of(image) > 1 or not image.keeps_walks or image.is_moving:
            return _collect(image, clock, call_sites)
        kept = image.once(_Kept)
        if kept.snapshot is None or (call_sites and not kept.call_sites):
            more = _More(SlabCells(image, read_owners(image).payer), ZswapExamples())
            snapshot = _collect(image, clock, call_sites, more)
            if image.progress.stop:
                return snapshot
            kept.snapshot, kept.more, kept.call_sites = snapshot, more, call_sites
        return kept.snapshot


class _More(NamedTuple):
    """What the audit does not need, and other commands would have to read again."""

    cells: SlabCells
    zswap: ZswapExamples


class _Kept:
    """The snapshot of an image, for the next command of a session. Nobody changes it."""

    def __init__(self, image: Image) -> None:
        self.snapshot: Snapshot | None = None
        self.more: _More | None = None
        self.call_sites = False  # whether the snapshot has references to call sites


def kept_slabs(image: Image) -> tuple[SlabCells, Mapping[str, Coverage]] | None:
    """
    Return the slabs that an earlier command of a session has read, and what it could read.

    :return: ``None`` if there was none, or if it could not read everything
    """
    kept = image.kept(_Kept)
    if kept is None or kept.snapshot is None or kept.more is None:
        return None
    coverage = kept.snapshot.coverage
    is_whole = not any(found.unreadable for found in coverage.values())
    # A freed page that is still charged is no large kmalloc of the audit.
    if not is_whole or not kept.more.cells.are_all_known or kept.snapshot.freed:
        return None
    return kept.more.cells, coverage


def kept_zswap(image: Image) -> ZswapExamples | None:
    """Return the zswap entries that an earlier command of a session has read, some of each."""
    kept = image.kept(_Kept)
    return None if kept is None or kept.more is None else kept.more.zswap


def _collect(image: Image, clock: Clock, call_sites: bool, more: _More | None = None) -> Snapshot:
    total, measure = Partial(), clock.measure
    coverage = total.coverage
    sites = CallSites(image, coverage) if call_sites and not why_not_profiled(image) else None
    with measure("memcgs"):
        memcgs, objcgs, unreadable = _owners(image, coverage)
        objcg_sets = read_objcg_sets(image, objcgs.values(), coverage["objcg_sets"])
    with measure("counters"):
        reader, folds = _stat_reader(image), Folds(image)
        counters = read_counters(image, reader, memcgs, coverage["counters"], folds=folds)
    with measure("memcgs"):
        unfolded = folds.unfolded(reader, coverage["updated"])
        usage = read_usage(image, memcgs, coverage["counters"])
        lists, sizes = _lru_lists(image, memcgs, coverage)
        stocks = read_obj_stocks(image, coverage["stock"])
        css = read_css_refs(image, memcgs, coverage["css"])
        ids = swap_ids(image, coverage["swap_ids"])
    with measure("tasks"):
        tasks, maps = _tasks(image, memcgs, coverage), read_map_references(image, coverage["bpf"])
        references = {"task": _objcgs_of_tasks(tasks), "bpf": maps.held}
    with measure("vmalloc"):
        uses = _page_uses(image, total)
    with measure("pages"):
        _add_pages(image, total, _context(memcgs, uses, more), sites)
    with measure("percpu"):
        if accounts_by_node(image) and coverage["objcgs"].unreadable:
            objcgs |= recover_for_percpu(image, objcgs, coverage["objcgs"])
        per_node = per_node_of(image, objcgs, coverage["objcgs"])
        percpu = _add_percpu(image, total, per_node, sites)
    with measure("zswap"):
        references["zswap"], unlisted = _add_zswap(image, total, objcgs, per_node, more)
    with measure("memcgs"):
        objcgs |= _recovered(image, total, memcgs, objcgs, stocks, references)
    return Snapshot(
        image=image_info(image),
        features=_features(image, reader, len(memcgs) > 1, coverage),
        memcgs=memcgs,
        objcgs=objcgs,
        objcg_sets=objcg_sets,
        ledger=total.ledger,
        counters=counters,
        limits=read_limits(image),
        local=folds.found.local,
        unfolded=unfolded,
        csses_since=csses_made_since(image, memcgs, coverage["css"]),
        stocks=stocks,
        charge_stocks=read_charge_stocks(image, coverage["charge_stock"]),
        usage=usage,
        references=references,
        unknown_holders={o: f"BPF maps of {name}" for o, name in maps.unknown.items()},
        css=css,
        css_holders=_css_holders(image, total),
        swap_ids=ids,
        swap_entries=read_swap_entries(image, memcgs, ids, coverage["swap_ids"]),
        page_counters=read_page_counters(image, memcgs, coverage["counters"]),
        transients=total.transients_by_objcg(),
        unlisted_zswap=unlisted,
        moving=read_moving(image, memcgs, coverage["moving"]),
        per_node=None if per_node is None else per_node.charges(),
        tasks=tasks,
        active_memcgs=read_active_memcgs(image, tasks, coverage["tasks"]),
        cached_stacks=_cached_stacks(image, coverage["cached_stacks"]),
        vectors=total.vectors_by_node(),
        sockets=total.sockets_by_memcg(),
        slab_usage=total.slabs.usage(),
        percpu_usage=percpu,
        freed=sorted(total.freed),
        large_kmalloc=total.large_kmalloc,
        node_pages=total.node_pages,
        all_nodes=read_nodes(image, coverage["node_stats"]),
        node_stats=read_node_stats(image, coverage["node_stats"]),
        zones=read_zone_counters(image, total, coverage["zones"]),
        lru=LruLists(_pages_on_lists(total, lists), sizes, lists.by_generation),
        hugetlb=read_hugetlb(image, total, coverage["hugetlb"]),
        user_pages=UserPages(total.user_pages, may_have_collapsed_files(image)),
        profile=_profile(image, sites, total) if call_sites else None,
        coverage=dict(coverage),
        unreadable=frozenset(memcgs[memcg].payer for memcg in unreadable),
    )


def _owners(
    image: Image, coverage: Mapping[str, Coverage]
) -> tuple[Mapping[int, Memcg], dict[int, Objcg], Set[int]]:
    """Return memcgs, obj_cgroups, and the memcgs with unreadable obj_cgroups."""
    owners = read_owners(image)
    for subject, found in owners.coverage.items():
        coverage[subject].add(found)
    return owners.memcgs, dict(owners.objcgs), owners.unreadable


def _objcgs_of_tasks(tasks: Iterable[TaskCharge]) -> Counter[int]:
    return Counter(objcg for task in tasks for objcg in task.objcgs if objcg)


def _stat_reader(image: Image) -> StatReader:
    items = (*items_read(), *lruvec_items(image), *sorted(reparented_items(image).of_memcgs))
    return StatReader(image, dict.fromkeys(items))


def _lru_lists(
    image: Image, memcgs: Iterable[int], coverage: dict[str, Coverage]
) -> tuple[LruReader, dict[tuple[int, int], Sizes]]:
    lists = LruReader(image, coverage["lru"])
    sizes = lists.sizes(read_lruvecs(image, memcgs, coverage["lru"]))
    coverage["lru_walks"] = lists.walks
    return lists, sizes


def _cached_stacks(image: Image, coverage: Coverage) -> list[CachedStackPage] | None:
    return list(read_cached_stacks(image, coverage)) if caches_stacks(image) else None


def _tasks(
    image: Image, memcgs: Container[int], coverage: Mapping[str, Coverage]
) -> list[TaskCharge]:
    """
    Read all tasks, and count those whose memcg is unknown as unreadable.

    A task keeps its memcg from being released. On a running kernel it may be a new one.
    """
    tasks = list(read_tasks(image, coverage["tasks"]))
    if image.is_moving or coverage["memcgs"].unreadable:
        return tasks
    for task in tasks:
        if task.memcg not in memcgs:
            reason = f"its memcg {task.memcg:#x} is not among those that were read"
            coverage["tasks"].miss("memcg of a task", task.address, reason)
    return tasks


def _context(memcgs: Iterable[int], uses: PageUses, more: _More | None) -> PassContext:
    return PassContext(frozenset(memcgs), uses, cells=None if more is None else more.cells)


def _page_uses(image: Image, total: Partial) -> PageUses:
    uses = page_uses(image, total.coverage)
    if uses.stacks_are_blocks and total.coverage["stacks"].unreadable:
        total.ledger.note_missing("kmem", "stack")
    return uses


def _add_pages(image: Image, total: Partial, context: PassContext, sites: CallSites | None) -> None:
    """Read all page frames."""
    coverage = Coverage()
    context = replace(context, protocols=socket_caches(image, coverage))
    if coverage.unreadable:
        total.ledger.note_missing("sock")
    if sites is not None:
        context = replace(context, call_sites=True)
    run = None if image.pool is None else map_elsewhere(image, image.pool, context)
    total.merge(collect_ranges(image, context, run))
    _note_lost_pages(image, total)
    _add_compound_pages(image, total, context.cells)
    _add_unplaced_pages(image, total)
    total.coverage["sock"].add(coverage)
    for metadata in kfence_pool(image).unreadable:
        total.coverage["kfence"].miss("metadata of KFENCE", metadata, "not in the image")
    try:
        on_devices = has_user_pages_on_devices(image)
    except FaultError as error:
        total.coverage["pages"].miss("device memory", error.address, str(error))
        on_devices = True
    if on_devices:
        # They are charged, but their sections are not online, so they were not read.
        total.ledger.note_missing("lru")
    for address, reason in total.unnamed.items():
        total.coverage["names"].miss("name of a kmem_cache", address, reason)


def _note_lost_pages(image: Image, total: Partial) -> None:
    """Note that pages of zones may be of any kind if they have no memory map."""
    for lost in miss_lost_pages(image, total.coverage["pages"]):
        total.ledger.note_missing_pages(lost.nid)
        if not page_layout(image).has_large_kmalloc:
            # Files that own compound pages, which pass for large kmallocs then.
            total.coverage["compound"].miss("files", lost.zone, lost.reason)


def _add_compound_pages(image: Image, total: Partial, cells: SlabCells | None) -> None:
    """Add the compound pages that are large kmallocs if they have no other owner."""
    if not total.compound:
        return
    owners = CompoundOwners(image, SlabReader(image))
    others = owners.pages(total.files, total.coverage["compound"])
    keep_pages_of_others(image, others, total.coverage["compound"])
    for page, (entry, size) in total.compound.items():
        total.ledger.add(entry._replace(detail="other") if page in others else entry, size, 1)
        if cells is not None and page not in others:
            cells.add_larges(entry.payer, entry.nid, size // mem_map(image).page_size, 1)


def _add_unplaced_pages(image: Image, total: Partial) -> None:
    """
    Add the pages that a running kernel charged after the owners of pages had been read.

    A page that is freed again by now is of use ``gone``: it may have been a stack.
    """
    if not total.unplaced:
        return
    uses = uses_of_areas(vm_areas(image, Coverage(), Coverage()))
    payers = kernel_payers(image, [page for page in total.unplaced if page not in uses])
    for page, (entry, size) in total.unplaced.items():
        now, _ = payers.get(page, (entry.payer, entry.nid))
        use = uses.get(page, "other" if now == entry.payer else GONE)
        total.ledger.add(entry._replace(detail=use), size, 1)


def _add_percpu(
    image: Image, total: Partial, per_node: PerNode | None, sites: CallSites | None
) -> tuple[PercpuUsage, ...]:
    reader = PercpuReader(image)
    add_percpu(total.ledger, reader, per_node, sites.percpu(reader) if sites else None)
    total.coverage["percpu"] = reader.coverage
    total.coverage["percpu_nodes"] = reader.placement
    return percpu_usage(total.ledger, reader)


def _add_zswap(
    image: Image,
    total: Partial,
    objcgs: Mapping[int, Objcg],
    per_node: PerNode | None,
    more: _More | None,
) -> ZswapAdded:
    reader, charged = ZswapReader(image), on_default_hierarchy(image)
    examples = None if more is None else more.zswap
    added = add_zswap(total.ledger, reader, objcgs, per_node, charged, examples)
    total.coverage["zswap"] = reader.coverage
    total.coverage["zswap_nodes"] = reader.placement
    return added


def _recovered(
    image: Image,
    total: Partial,
    memcgs: Mapping[int, Memcg],
    objcgs: Mapping[int, Objcg],
    stocks: Iterable[ObjStock],
    references: Mapping[str, Iterable[int]],
) -> dict[int, Objcg]:
    """Return obj_cgroups that are referred to, if not all could be read through their memcgs."""
    coverage = total.coverage
    if not coverage["memcgs"].unreadable and not coverage["objcgs"].unreadable:
        return {}
    held = {stock.objcg for stock in stocks}.union(*references.values())
    return recover_for_charges(image, total, memcgs, objcgs, held)


def _css_holders(image: Image, total: Partial) -> dict[str, Counter[int]]:
    """Return references to memcgs by holder, then by memcg, that were found in other steps."""
    cursors: Counter[int] = Counter()
    coverage = total.coverage["zswap_cursor"]
    try:
        cursors.update(zswap_cursors(image))
        coverage.read += 1
    except FaultError as error:
        coverage.miss("cursor of zswap", error.address, str(error))
    return {"notify": total.groups, "released": total.released, "zswap": cursors}


def _pages_on_lists(total: Partial, lists: LruReader) -> Counter[tuple[int, int, str]]:
    """Return the pages on LRU lists, by payer, node and list."""
    on_lists: Counter[tuple[int, int, str]] = Counter()
    for (payer, nid, zone, flags), pages in total.lru.items():
        on_lists[payer, nid, lists.item(zone, flags)] += pages
    return on_lists


def _profile(image: Image, sites: CallSites | None, total: Partial) -> Profile:
    return Profile(why_not_profiled(image)) if sites is None else sites.finish(total)


def _features(
    image: Image,
    reader: StatReader,
    has_memcgs: bool,
    coverage: defaultdict[str, Coverage],
) -> Features:
    # The root is never charged: without others, the keys are off on any kernel.
    off = not_accounted(image, coverage["static_keys"]) if has_memcgs else ()
    return Features(
        items=frozenset(reader.slots),
        # User pages refer to obj_cgroups since memcgs have one for each node (7.1).
        lru_holds_objcg=has_node_objcgs(image),
        lru_charged_to_own_node=charges_node_of_folio(image),
        default_hierarchy=on_default_hierarchy(image),
        caches_objcg=caches_objcg(image),
        large_kmalloc_type=page_layout(image).has_large_kmalloc,
        zswap=has_type(image, "struct zswap_entry"),
        memcg_items=memcg_items(image),
        lruvec_items=lruvec_items(image),
        node_items=tuple(node_stat_items(image).values()),
        page_counters=page_counters(image),
        local=reparented_items(image),
        has_local=has_member(image, "struct memcg_vmstats", "state_local"),
        not_accounted=off,
    )
