# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Helpers
-------

The ``memcg_inspect`` package provides helpers for memory cgroups and for the memory that they are
charged, in the style of ``drgn.helpers.linux``. Kernel objects are returned as
:class:`drgn.Object`, paths as :class:`bytes`, and amounts as :class:`int`.

Every helper raises :class:`drgn.FaultError` for memory that it needs and cannot read, and
:class:`memcg_inspect.model.ImageError` if the kernel lacks a type or a variable that it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from drgn import NULL, FaultError, IntegerLike, Object, Path, Program
from drgn.helpers.common.prog import takes_program_or_default

from memcg_inspect.checks.counters import CounterValue
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm import memcontrol
from memcg_inspect.linux.mm.debug import read_page
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.show_mem import miss_lost_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model import Coverage, Stat

__all__ = (
    "ChargedSlabObject",
    "CounterValue",
    "PcpuAllocation",
    "find_memcg",
    "for_each_charged_slab_object",
    "for_each_memcg",
    "for_each_pcpu_alloc",
    "memcg_counter",
    "memcg_path",
    "objcg_memcg",
    "objcg_nid",
    "page_to_nid",
    "slab_objcg",
)


class ChargedSlabObject(NamedTuple):
    """Slab object that is charged to a memcg."""

    address: int
    """Address of the object."""
    slab_cache: Object
    """``struct kmem_cache *`` that the object is from."""
    size: int
    """Size of the object in its slab, in bytes."""
    charge: int
    """Bytes charged for the object."""
    nid: int
    """NUMA node of the slab."""
    slab: Object
    """``struct slab *`` that contains the object."""
    objcg: Object
    """``struct obj_cgroup *`` that the object is charged to."""


class PcpuAllocation(NamedTuple):
    """Percpu allocation that is charged to a memcg."""

    pointer: Object
    """``void __percpu *`` that ``alloc_percpu()`` returned."""
    size: int
    """Size of each CPU's copy, in bytes."""
    charge: int
    """Bytes charged for all CPUs, including the pointer to the ``obj_cgroup``."""
    nodes: dict[int, int]
    """Bytes on each NUMA node."""
    objcg: Object
    """``struct obj_cgroup *`` that the allocation is charged to."""


class _FaultingCoverage(Coverage):
    """Raises :class:`drgn.FaultError` when a reader counts something as unreadable."""

    def miss(self, what: str, address: int, reason: str) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, FaultError):
            raise error
        raise FaultError(f"{what}: {reason}", address)


@takes_program_or_default
def for_each_memcg(prog: Program) -> Iterator[Object]:
    """
    Iterate over all memcgs in pre-order, including removed ones that are not freed yet.

    :return: Iterator of ``struct mem_cgroup *`` objects.
    :raises drgn.FaultError: if the children of a memcg cannot be read
    """
    return memcontrol.memcg_descendants(image_of(prog), memcontrol.root_memcg(image_of(prog)))


@takes_program_or_default
def find_memcg(prog: Program, path: Path) -> Object:
    """
    Find a memcg by its path in the cgroup hierarchy.

    If removed memcgs have the same path, the one that was not removed is returned.

    :param path: Path name; ``/`` is the root.
    :return: ``struct mem_cgroup *`` (``NULL`` if not found)
    :raises drgn.FaultError: if a memcg on the way cannot be read
    """
    return memcontrol.find_memcg(image_of(prog), os.fsencode(path))


def memcg_path(memcg: Object) -> bytes:
    """
    Get the path of a memcg in the cgroup hierarchy.

    The path of a removed memcg is the one that it had.

    :param memcg: ``struct mem_cgroup *``
    """
    return memcontrol.memcg_path(memcg)


def page_to_nid(page: Object) -> int:
    """
    Get the NUMA node of a page from its flags.

    :param page: ``struct page *``, ``struct slab *`` or ``struct folio *``
    """
    prog = page.prog_
    frames = mem_map(image_of(prog))
    return frames.nid(prog.read_word(page.value_() + frames.flags))


def objcg_memcg(objcg: Object) -> Object:
    """
    Get the memcg that an ``obj_cgroup`` charges.

    After its memcg is removed, an ``obj_cgroup`` charges the nearest ancestor that is not removed.

    :param objcg: ``struct obj_cgroup *``
    :return: ``struct mem_cgroup *``
    """
    return objcg.memcg.read_()


def objcg_nid(objcg: Object) -> int | None:
    """
    Get the NUMA node that an ``obj_cgroup`` is for.

    :param objcg: ``struct obj_cgroup *``
    :return: Node, or ``None`` if the kernel has one ``obj_cgroup`` for all nodes of a memcg
        (up to Linux 7.0) or if no memcg refers to this one.
    """
    return memcontrol.objcg_nid(image_of(objcg.prog_), objcg)


def slab_objcg(slab: Object, index: IntegerLike) -> Object:
    """
    Get the ``obj_cgroup`` that an object of a slab is charged to.

    :param slab: ``struct slab *``
    :param index: Index of the object in the slab.
    :return: ``struct obj_cgroup *`` (``NULL`` if the object is not charged)
    """
    prog, page, number = slab.prog_, slab.value_(), int(index)
    reader, where = _slab_reader(prog), read_page(image_of(prog), page).slab
    found = None if where is None else reader.slab(where)
    if found is None or not 0 <= number < found.objects:
        return NULL(prog, "struct obj_cgroup *")
    return Object(prog, "struct obj_cgroup *", reader.objcg(found, number))


def _slab_reader(prog: Program) -> SlabReader:
    reader = SlabReader(image_of(prog), names=_FaultingCoverage())
    reader.coverage = _FaultingCoverage()
    return reader


@takes_program_or_default
def for_each_charged_slab_object(
    prog: Program, *, memcg: Object | None = None, nid: int | None = None
) -> Iterator[ChargedSlabObject]:
    """
    Iterate over all slab objects that are charged to memcgs.

    This reads the ``struct page`` of every page once, even if *memcg* or *nid* is given.

    :param memcg: ``struct mem_cgroup *``: only objects that are charged to it today.
    :param nid: Only objects on this NUMA node.
    """
    reader, filter_ = _slab_reader(prog), _ChargedTo(memcg)
    miss_lost_pages(image_of(prog), _FaultingCoverage())
    for piece in scan_pages(image_of(prog)):
        if piece.unreadable is not None:
            raise FaultError("the memory map cannot be read", piece.unreadable)
        for wrong in piece.wrong:
            if wrong.kind == "slab":
                raise FaultError(f"the order of a slab: {wrong.reason}", wrong.page)
        for page in piece.slabs:
            if nid is not None and page.nid != nid:
                continue
            slab = reader.slab(page)
            if slab is None or not slab.charged:
                continue
            cache = Object(prog, "struct kmem_cache *", slab.cache.address)
            for obj in reader.charged_objects(slab):
                objcg = Object(prog, "struct obj_cgroup *", obj.objcg)
                if filter_.has(objcg):
                    yield ChargedSlabObject(
                        address=obj.address,
                        slab_cache=cache,
                        size=slab.cache.size,
                        charge=slab.cache.charge,
                        nid=slab.nid,
                        slab=Object(prog, "struct slab *", slab.page),
                        objcg=objcg,
                    )


class _ChargedTo:
    """
    Finds the obj_cgroups that charge a memcg. Each is looked up once.

    :param memcg: ``struct mem_cgroup *``; ``None`` for any
    """

    def __init__(self, memcg: Object | None) -> None:
        if memcg is not None and not memcg:
            raise ValueError("memcg is NULL")
        self._memcg = memcg
        self._known: dict[int, bool] = {}

    def has(self, objcg: Object) -> bool:
        """
        Return whether an ``obj_cgroup`` charges the memcg.

        :param objcg: ``struct obj_cgroup *``
        """
        if self._memcg is None:
            return True
        address = objcg.value_()
        if address not in self._known:
            payer = memcontrol.payer_of(image_of(objcg.prog_), objcg_memcg(objcg))
            self._known[address] = bool(payer == self._memcg)
        return self._known[address]


@takes_program_or_default
def for_each_pcpu_alloc(prog: Program, *, memcg: Object | None = None) -> Iterator[PcpuAllocation]:
    """
    Iterate over all percpu allocations that are charged to memcgs.

    :param memcg: ``struct mem_cgroup *``: only allocations that are charged to it today.
    """
    reader, filter_ = PercpuReader(image_of(prog)), _ChargedTo(memcg)
    reader.coverage = reader.placement = _FaultingCoverage()
    for chunk in reader.chunks():
        for alloc in reader.charged(chunk):
            objcg = Object(prog, "struct obj_cgroup *", alloc.objcg)
            if filter_.has(objcg):
                yield PcpuAllocation(
                    pointer=Object(prog, "void *", reader.pointer(alloc)),
                    size=alloc.size,
                    charge=reader.charge(alloc),
                    nodes=dict(reader.data_nodes(alloc)),
                    objcg=objcg,
                )


def memcg_counter(memcg: Object, item: str, nid: int | None = None) -> CounterValue:
    """
    Get a counter of a memcg and its descendants, before and after a flush.

    :param memcg: ``struct mem_cgroup *``
    :param item: Name of an enumerator of ``enum memcg_stat_item`` or ``enum node_stat_item``.
    :param nid: NUMA node, or ``None`` for all nodes.
    :return: Counter in the unit of the item: bytes if its name ends in ``_B``, KiB if it ends in
        ``_KB``, else pages or events.
    :raises ValueError: if the kernel does not have such a counter
    """
    image = image_of(memcg.prog_)
    reader = StatReader(image, [item])
    own = _stat(image, reader, memcg, item, nid)
    if own is None:
        where = "memcgs" if nid is None else f"memcgs on node {nid}"
        raise ValueError(f"this kernel has no counter {item} of {where}")
    pending = own.pending + own.percpu
    below = memcontrol.memcg_descendants(image, memcg)
    next(below)  # the memcg itself
    for descendant in below:
        stat = _stat(image, reader, descendant, item, nid)
        if stat is not None:
            pending += stat.pending + stat.percpu
    return CounterValue(own.state, pending)


def _stat(
    image: Image, reader: StatReader, memcg: Object, item: str, nid: int | None
) -> Stat | None:
    if nid is None:
        return reader.memcg(memcg).get(item)
    pn = dict(memcontrol.nodeinfo(image, memcg)).get(nid)
    return None if pn is None else reader.lruvec(pn).get(item)
