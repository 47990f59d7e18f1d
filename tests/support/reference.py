# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A plain walk of charged slab objects, one drgn Object at a time.

It shares no code with the package. Tests compare the fast readers with its counts, and benchmarks
compare them with its time. It finds nodes from the page frames that each ``pglist_data`` spans,
not from page flags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from drgn import Object, Program, cast
from drgn.helpers.linux.mm import PageSlab, compound_order, for_each_page, page_to_pfn, virt_to_pfn
from drgn.helpers.linux.mmzone import for_each_online_pgdat

#: (obj_cgroup, node, SLAB_RECLAIM_ACCOUNT) -> (bytes, objects)
Charges = Counter[tuple[int, int, bool]]


def node_spans(prog: Program) -> list[tuple[int, int, int]]:
    """Return the page frames that each node spans. The lab's nodes do not overlap."""
    return [
        (
            pgdat.node_start_pfn.value_(),
            pgdat.node_start_pfn.value_() + pgdat.node_spanned_pages.value_(),
            pgdat.node_id.value_(),
        )
        for pgdat in for_each_online_pgdat(prog)
        if pgdat.node_present_pages
    ]


def charged_slab_objects(prog: Program) -> tuple[Charges, Charges]:
    """Return bytes and number of all charged slab objects."""
    spans = node_spans(prog)
    reclaimable_flag = _reclaimable_flag(prog)
    size, number = Charges(), Charges()
    for page in for_each_page(prog):
        if not PageSlab(page):
            continue
        slab = cast("struct slab *", page)
        cache = slab.slab_cache.read_()
        pfn = page_to_pfn(page).value_()
        nid = next(nid for start, end, nid in spans if start <= pfn < end)
        reclaimable = bool(cache.flags & reclaimable_flag)
        for index in range(slab.objects.value_()):
            objcg = object_objcg(slab, cache, index)
            if objcg:
                size[objcg, nid, reclaimable] += cache.size.value_() + 8
                number[objcg, nid, reclaimable] += 1
    return size, number


class PlainSlab(NamedTuple):
    """
    A slab, read one object at a time.

    :ivar cache: ``struct kmem_cache *``
    :ivar room: number of objects that it can hold
    :ivar inuse: ``slab->inuse``
    :ivar charged: number of charged objects by ``struct obj_cgroup *``
    """

    cache: Object
    nid: int
    pages: int
    room: int
    inuse: int
    charged: Counter[int]


def plain_slabs(prog: Program) -> Iterator[PlainSlab]:
    """Yield all slabs but those in the pool of KFENCE."""
    spans, pool = node_spans(prog), _kfence(prog)
    for page in for_each_page(prog):
        pfn = page_to_pfn(page).value_()
        if not PageSlab(page) or pfn in pool:
            continue
        slab = cast("struct slab *", page)
        cache, room = slab.slab_cache.read_(), slab.objects.value_()
        objcgs = Counter(object_objcg(slab, cache, index) for index in range(room))
        del objcgs[0]
        nid = next(nid for start, end, nid in spans if start <= pfn < end)
        pages = 1 << compound_order(page).value_()
        yield PlainSlab(cache, nid, pages, room, slab.inuse.value_(), objcgs)


def _kfence(prog: Program) -> range:
    """Return the page frames of KFENCE, none if it is off. It has 255 objects here."""
    try:
        pool = prog["__kfence_pool"]
    except LookupError:
        return range(0)
    if not pool:
        return range(0)
    start = virt_to_pfn(pool).value_()
    return range(start, start + 512)


def object_objcg(slab: Object, cache: Object, index: int) -> int:
    """Return the obj_cgroup of an object; 0 if it is not charged."""
    prog = slab.prog_
    if hasattr(slab, "memcg_data"):  # 6.1
        vector = slab.memcg_data.value_() & ~7
        return (
            Object(prog, "struct obj_cgroup *", address=vector + 8 * index).value_()
            if vector
            else 0
        )
    vector = slab.obj_exts.value_() & ~7
    if not vector:
        return 0
    ext_type = prog.type("struct slabobj_ext")
    if hasattr(slab, "obj_exts_needs_objcg"):  # 7.3
        if not slab.obj_exts_needs_objcg:
            return 0
        stride = cache.size.value_() if slab.obj_exts_in_object else 8 * (1 + _has_codetags(prog))
        return Object(prog, ext_type, address=vector + stride * index)._objcg.value_()
    stride = ext_type.size
    if hasattr(slab, "stride") and slab.stride:  # 7.0
        stride = slab.stride.value_()
    return Object(prog, ext_type, address=vector + stride * index).objcg.value_() & ~7


def _has_codetags(prog: Program) -> bool:
    try:
        return prog["slab_obj_ext_has_codetag_key"].key.enabled.counter.value_() > 0
    except KeyError:
        return False


def _reclaimable_flag(prog: Program) -> int:
    try:
        return 1 << prog["_SLAB_RECLAIM_ACCOUNT"].value_()
    except KeyError:
        return 0x20000
