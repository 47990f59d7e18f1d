# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Helpers for interactive sessions
--------------------------------

In the style of drgn's own: they take a :class:`drgn.Program`, or find the default one, or an
:class:`drgn.Object`. What one goes on exploring comes back as an Object, what one counts as a
plain row. ``import memcg_inspect`` offers all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drgn import NULL, Object, Program
from drgn.helpers.common.prog import takes_program_or_default

from memcg_inspect.checks.counters import CounterValue
from memcg_inspect.collect.counters import read_counters
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mm_types import SlabPage, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.model import Coverage, Memcg, Report
from memcg_inspect.tables import UsageError, as_path

__all__ = (
    "ChargedSlabObject",
    "CounterValue",
    "PcpuAllocation",
    "audit",
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
    """A slab object that a memcg pays for."""

    address: int
    """Address of the object."""
    cache: str
    """Name of its cache."""
    size: int
    """Bytes that it takes in its slab."""
    charge: int
    """Bytes that are charged for it."""
    nid: int
    """Node of the slab."""
    slab: Object
    """``struct slab *``"""
    objcg: Object
    """``struct obj_cgroup *``"""


class PcpuAllocation(NamedTuple):
    """A percpu allocation that a memcg pays for."""

    pointer: int
    """What ``alloc_percpu()`` returned: its address on a CPU is this and the CPU's offset."""
    size: int
    """Bytes for each CPU."""
    charge: int
    """Bytes that are charged for it, for all CPUs, and for the pointer to who pays."""
    nodes: dict[int, int]
    """Bytes by the node of the page that holds them."""
    objcg: Object
    """``struct obj_cgroup *``"""


@takes_program_or_default
def audit(prog: Program) -> Report:
    """
    Compare what memcgs are charged for with their counters.

    :return: the report that ``memcg-inspect audit --json`` prints
    :raises ImageError: if this kernel does not charge kernel memory to memcgs, or keeps its
        charges in a way that is not known here
    """
    from memcg_inspect import collect

    return collect.audit(image_of(prog))


def _memcgs(prog: Program) -> dict[int, Memcg]:
    return read_memcgs(image_of(prog), Coverage())


def _address(memcg: Object | str | None, prog: Program) -> int | None:
    if memcg is None:
        return None
    return int(find_memcg(prog, memcg) if isinstance(memcg, str) else memcg)


@takes_program_or_default
def for_each_memcg(prog: Program) -> Iterator[Object]:
    """
    Iterate over all memcgs, parents first, removed ones included until they are freed.

    :return: Iterator of ``struct mem_cgroup *`` objects.
    """
    for address in _memcgs(prog):
        yield Object(prog, "struct mem_cgroup *", address)


@takes_program_or_default
def find_memcg(prog: Program, path: str) -> Object:
    """
    Find a memcg.

    :param path: Path in the cgroup hierarchy, ``/`` for the root; of several memcgs of one path
        all but one were removed, and that one is returned.
    :return: ``struct mem_cgroup *``
    :raises UsageError: if there is none
    """
    path = as_path(path)
    found = [memcg for memcg in _memcgs(prog).values() if memcg.path == path]
    if not found:
        raise UsageError(f"there is no memcg {path}")
    found.sort(key=lambda memcg: memcg.state != "online")
    return Object(prog, "struct mem_cgroup *", found[0].address)


def memcg_path(memcg: Object) -> str:
    """
    Return the path of a memcg in the cgroup hierarchy, removed ones' too.

    :param memcg: ``struct mem_cgroup *``
    :raises UsageError: if it is no memcg
    """
    known = _memcgs(memcg.prog_).get(memcg.value_())
    if known is None:
        raise UsageError(f"there is no memcg at {memcg.value_():#x}")
    return known.path


def page_to_nid(page: Object) -> int:
    """
    Return the NUMA node of a page, from its flags.

    :param page: ``struct page *`` (or ``struct slab *``, ``struct folio *``)
    """
    prog = page.prog_
    frames = mem_map(image_of(prog))
    return frames.nid(prog.read_word(page.value_() + frames.flags))


def objcg_memcg(objcg: Object) -> Object:
    """
    Return the memcg that an obj_cgroup charges today: its own, or the nearest that is left.

    :param objcg: ``struct obj_cgroup *``
    :return: ``struct mem_cgroup *``
    """
    return objcg.memcg.read_()


def objcg_nid(objcg: Object) -> int | None:
    """
    Return the node that an obj_cgroup charges.

    :param objcg: ``struct obj_cgroup *``
    :return: ``None`` on kernels whose memcgs have one obj_cgroup for all nodes (before 7.2), and
        for one that no memcg knows
    """
    from memcg_inspect.linux.mm.memcontrol import has_node_objcgs, read_objcgs

    prog = objcg.prog_
    if not has_node_objcgs(image_of(prog)):
        return None
    known = read_objcgs(image_of(prog), _memcgs(prog), Coverage(), set()).get(objcg.value_())
    return None if known is None else known.nid


def slab_objcg(slab: Object, index: int) -> Object:
    """
    Return who pays for an object of a slab.

    :param slab: ``struct slab *``
    :param index: Index of the object in the slab.
    :return: ``struct obj_cgroup *``; ``NULL`` if nobody does
    :raises drgn.FaultError: if the slab, or the vector of its obj_cgroups, cannot be read
    """
    prog = slab.prog_
    frames, page = mem_map(image_of(prog)), slab.value_()
    reader = SlabReader(image_of(prog))
    raw = prog.read(page, frames.size)
    found = reader.slab(SlabPage(page, frames.nid(prog.read_word(page + frames.flags)), 0, raw))
    objcg = 0
    if found is not None:
        charged = {thing.number: thing.objcg for thing in reader.charged_objects(found)}
        objcg = charged.get(index, 0)
    return (
        Object(prog, "struct obj_cgroup *", objcg) if objcg else NULL(prog, "struct obj_cgroup *")
    )


@takes_program_or_default
def for_each_charged_slab_object(
    prog: Program, *, memcg: Object | str | None = None, nid: int | None = None
) -> Iterator[ChargedSlabObject]:
    """
    Iterate over the slab objects that memcgs pay for, in one pass over all pages.

    :param memcg: ``struct mem_cgroup *``, or a path: only those that are charged to it today
    :param nid: only those on this node
    """
    wanted, reader, payers = _address(memcg, prog), SlabReader(image_of(prog)), _PayersOf(prog)
    for piece in scan_pages(image_of(prog)):
        for page in piece.slabs:
            if nid not in (None, page.nid):
                continue
            slab = reader.slab(page)
            if slab is None or not slab.charged:
                continue
            for thing in reader.charged_objects(slab):
                objcg = Object(prog, "struct obj_cgroup *", thing.objcg)
                if wanted is None or payers.of(objcg) == wanted:
                    yield ChargedSlabObject(
                        address=thing.address,
                        cache=slab.cache.name,
                        size=slab.cache.size,
                        charge=slab.cache.charge,
                        nid=slab.nid,
                        slab=Object(prog, "struct slab *", slab.page),
                        objcg=objcg,
                    )


class _PayersOf:
    """Memcgs of obj_cgroups, each looked up once."""

    def __init__(self, prog: Program) -> None:
        self._memcgs = _memcgs(prog)
        self._known: dict[int, int] = {}

    def of(self, objcg: Object) -> int:
        address = objcg.value_()
        if address not in self._known:
            memcg = objcg_memcg(objcg).value_()
            known = self._memcgs.get(memcg)
            self._known[address] = memcg if known is None else known.payer
        return self._known[address]


@takes_program_or_default
def for_each_pcpu_alloc(
    prog: Program, *, memcg: Object | str | None = None
) -> Iterator[PcpuAllocation]:
    """
    Iterate over the percpu allocations that memcgs pay for.

    :param memcg: ``struct mem_cgroup *``, or a path: only those that are charged to it today
    """
    wanted, reader, payers = _address(memcg, prog), PercpuReader(image_of(prog)), _PayersOf(prog)
    for chunk in reader.chunks():
        for alloc in reader.charged(chunk):
            objcg = Object(prog, "struct obj_cgroup *", alloc.objcg)
            if wanted is None or payers.of(objcg) == wanted:
                yield PcpuAllocation(
                    pointer=reader.pointer(alloc),
                    size=alloc.size,
                    charge=reader.charge(alloc),
                    nodes=dict(reader.data_nodes(alloc)),
                    objcg=objcg,
                )


def memcg_counter(memcg: Object, item: str, nid: int | None = None) -> CounterValue:
    """
    Return a counter of a memcg, descendants included, flushed or not.

    :param memcg: ``struct mem_cgroup *``
    :param item: Enumerator of ``enum memcg_stat_item`` or ``enum node_stat_item``.
    :param nid: Node; ``None`` for the memcg as a whole
    :raises UsageError: if the kernel keeps no such counter
    :raises drgn.FaultError: if it cannot be read
    """
    prog = memcg.prog_
    reader = StatReader(image_of(prog), [item])
    if item not in reader.slots:
        raise UsageError(f"this kernel keeps no {item} for memcgs")
    coverage = Coverage()
    counters = read_counters(image_of(prog), reader, _memcgs(prog), coverage)
    claim = counters.hierarchical(memcg.value_(), item, nid)
    if claim is None:
        why = coverage.examples[0].reason if coverage.examples else f"it is not kept on node {nid}"
        raise UsageError(f"{item} of this memcg: {why}")
    return CounterValue(claim.folded, claim.pending)
