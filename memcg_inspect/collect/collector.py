# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Collecting a snapshot
---------------------

:func:`collect` reads an image with the readers of :mod:`memcg_inspect.linux` and returns a
:class:`~memcg_inspect.checks.snapshot.Snapshot`. The memory map is read by
:mod:`memcg_inspect.collect.ranges`; everything else is small and read here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from drgn import FaultError

from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.registry import items_read
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.call_sites import CallSites
from memcg_inspect.collect.clock import Clock
from memcg_inspect.collect.counters import read_counters, read_lruvecs, read_usage
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.collect.page_uses import PageUses
from memcg_inspect.collect.partial import Partial
from memcg_inspect.collect.percpu import add_percpu, percpu_usage
from memcg_inspect.collect.pernode import PerNode, per_node_of
from memcg_inspect.collect.ranges import Mapper, PassContext, collect_ranges
from memcg_inspect.collect.recover import recover_for_charges, recover_for_percpu
from memcg_inspect.collect.zswap import add_zswap
from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.linux.kernel.bpf import bpf_objcgs
from memcg_inspect.linux.kernel.sched import caches_objcg, read_tasks
from memcg_inspect.linux.mm.alloc_tag import why_not_profiled
from memcg_inspect.linux.mm.memcontrol import (
    has_node_objcgs,
    on_default_hierarchy,
    read_memcgs,
    read_objcgs,
)
from memcg_inspect.linux.mm.memcontrol_stock import read_charge_stocks, read_obj_stocks
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.memremap import has_user_pages_on_devices
from memcg_inspect.linux.mm.mm_inline import LruReader
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.pernode import accounts_by_node
from memcg_inspect.linux.mm.vmstat import read_node_stats
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.linux.net.sock import socket_caches
from memcg_inspect.model import Coverage, Features, LruLists, Objcg, PercpuUsage

__all__ = ("collect",)

#: The counters of nodes that identities check.
NODE_ITEMS = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")


def collect(
    image: Image, clock: Clock | None = None, call_sites: bool = True, run: Mapper = map
) -> Snapshot:
    """
    Read everything that is checked, except the stacks of CPUs.

    :param clock: measures the steps; if not given, a new one
    :param call_sites: whether to read references to call sites, if the kernel has any
    :param run: see :func:`~memcg_inspect.collect.ranges.collect_ranges`
    :raises ImageError: if this kernel does not charge kernel memory to memcgs, or its layout is
        unknown
    """
    with as_image_errors():
        return _collect(image, clock or Clock(image.progress), call_sites, run)


def _collect(image: Image, clock: Clock, call_sites: bool, run: Mapper) -> Snapshot:
    total, measure = Partial(), clock.measure
    coverage = total.coverage
    sites = CallSites(image, coverage) if call_sites and not why_not_profiled(image) else None
    with measure("memcgs"):
        info = image_info(image)
        memcgs = read_memcgs(image, coverage["memcgs"], coverage["names"])
        unreadable: set[int] = set()
        objcgs = read_objcgs(image, memcgs, coverage["objcgs"], unreadable)
    with measure("counters"):
        reader = StatReader(image, items_read())
        counters = read_counters(image, reader, memcgs, coverage["counters"])
        usage = read_usage(image, memcgs, coverage["counters"])
        lists = LruReader(image, coverage["lru"])
        sizes = lists.sizes(read_lruvecs(image, memcgs, coverage["lru"]))
        coverage["lru_walks"] = lists.walks
        node_stats = read_node_stats(image, NODE_ITEMS, coverage["node_stats"])
        stocks = read_obj_stocks(image, coverage["stock"])
        charge_stocks = read_charge_stocks(image, coverage["charge_stock"])
    with measure("tasks"):
        tasks = list(read_tasks(image, coverage["tasks"]))
        references = {
            "task": Counter(objcg for task in tasks for objcg in task.objcgs if objcg),
            "bpf": Counter(bpf_objcgs(image, coverage["bpf"])),
        }
    with measure("vmalloc"):
        uses = _page_uses(image, total)
    with measure("pages"):
        _add_pages(image, total, PassContext(frozenset(memcgs), uses), sites, run)
    with measure("percpu"):
        if accounts_by_node(image) and coverage["objcgs"].unreadable:
            objcgs |= recover_for_percpu(image, objcgs, coverage["objcgs"])
        per_node = per_node_of(image, objcgs, coverage["objcgs"])
        percpu = _add_percpu(image, total, per_node, sites)
    with measure("zswap"):
        references["zswap"] = _add_zswap(image, total, objcgs, per_node)
    if coverage["memcgs"].unreadable or coverage["objcgs"].unreadable:
        with measure("memcgs"):
            held = {stock.objcg for stock in stocks}.union(*references.values())
            objcgs |= recover_for_charges(image, total, memcgs, objcgs, held)
    return Snapshot(
        image=info,
        features=_features(image, reader),
        memcgs=memcgs,
        objcgs=objcgs,
        ledger=total.ledger,
        counters=counters,
        stocks=stocks,
        charge_stocks=charge_stocks,
        usage=usage,
        references=references,
        transients=total.transients_by_objcg(),
        per_node=None if per_node is None else per_node.charges(),
        tasks=tasks,
        vectors=total.vectors_by_node(),
        sockets=total.sockets_by_memcg(),
        slab_usage=total.slabs.usage(),
        percpu_usage=percpu,
        large_kmalloc=total.large_kmalloc,
        node_stats=node_stats,
        lru=LruLists(_pages_on_lists(total, lists), sizes, lists.by_generation),
        profile=_profile(image, sites, total) if call_sites else None,
        coverage=dict(coverage),
        unreadable=frozenset(memcgs[memcg].payer for memcg in unreadable),
    )


def _page_uses(image: Image, total: Partial) -> PageUses:
    uses = PageUses(image, total.coverage)
    if uses.stacks_are_blocks and total.coverage["stacks"].unreadable:
        total.ledger.note_missing("kmem", "stack")
    if total.coverage["page_tables"].unreadable:
        total.ledger.note_missing("kmem", "other")
    return uses


def _add_pages(
    image: Image, total: Partial, context: PassContext, sites: CallSites | None, run: Mapper
) -> None:
    """Read all page frames."""
    coverage = Coverage()
    context = replace(context, protocols=socket_caches(image, coverage))
    if coverage.unreadable:
        total.ledger.note_missing("sock")
    if sites is not None:
        context = replace(context, call_sites=True, free_pages=sites.free_pages)
    total.merge(collect_ranges(image, context, run))
    total.coverage["sock"].add(coverage)
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


def _add_percpu(
    image: Image, total: Partial, per_node: PerNode | None, sites: CallSites | None
) -> tuple[PercpuUsage, ...]:
    reader = PercpuReader(image)
    add_percpu(total.ledger, reader, per_node, sites.percpu(reader) if sites else None)
    total.coverage["percpu"] = reader.coverage
    total.coverage["percpu_nodes"] = reader.placement
    return percpu_usage(total.ledger, reader)


def _add_zswap(
    image: Image, total: Partial, objcgs: Mapping[int, Objcg], per_node: PerNode | None
) -> Counter[int]:
    reader, charged = ZswapReader(image), on_default_hierarchy(image)
    references = add_zswap(total.ledger, reader, objcgs, per_node, charged)
    total.coverage["zswap"] = reader.coverage
    total.coverage["zswap_nodes"] = reader.placement
    return references


def _pages_on_lists(total: Partial, lists: LruReader) -> Counter[tuple[int, int, str]]:
    """Return the pages on LRU lists, by payer, node and list."""
    on_lists: Counter[tuple[int, int, str]] = Counter()
    for (payer, nid, zone, flags), pages in total.lru.items():
        on_lists[payer, nid, lists.item(zone, flags)] += pages
    return on_lists


def _profile(image: Image, sites: CallSites | None, total: Partial) -> Profile:
    return Profile(why_not_profiled(image)) if sites is None else sites.finish(total)


def _features(image: Image, reader: StatReader) -> Features:
    return Features(
        items=frozenset(reader.slots),
        # User pages refer to obj_cgroups since memcgs have one for each node (7.2).
        lru_holds_objcg=has_node_objcgs(image),
        default_hierarchy=on_default_hierarchy(image),
        caches_objcg=caches_objcg(image),
        large_kmalloc_type=page_layout(image).has_large_kmalloc,
        zswap=has_type(image, "struct zswap_entry"),
    )
