# SPDX-License-Identifier: LGPL-2.1-or-later
"""Find addresses of some charges of given payers. This reads all page frames again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from memcg_inspect.checks.ledger import ChargeKind, Entry
from memcg_inspect.collect.collector import kept_zswap
from memcg_inspect.collect.page_uses import compound_pages_of_others, page_uses
from memcg_inspect.collect.zswap import ZswapExamples
from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.memcg_data import Folio, folios_of
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_alloc import BlockReader
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.linux.net.sock import SockReader
from memcg_inspect.model import NUMA_NO_NODE, Coverage

__all__ = ("FolioGroup", "Examples", "find_examples")

#: Number of addresses kept for each entry of the ledger.
MOST = ZswapExamples.MOST


@dataclass
class FolioGroup:
    """
    User pages of one payer, node and ``page->mapping``.

    :ivar folios: number of folios
    :ivar pages: number of pages
    :ivar addresses: virtual addresses of a few of the folios
    """

    folios: int = 0
    pages: int = 0
    addresses: list[int] = field(default_factory=list)


@dataclass
class Examples:
    """
    Some charges of given payers.

    :ivar addresses: a few virtual addresses by entry of the ledger. Entries of percpu memory have
        no detail.
    :ivar folios: all user pages by payer, node, ``page->mapping``, and whether they are in the
        swap cache
    """

    addresses: defaultdict[Entry, list[int]] = field(default_factory=lambda: defaultdict(list))
    folios: defaultdict[tuple[int, int, int, bool], FolioGroup] = field(
        default_factory=lambda: defaultdict(FolioGroup)
    )


def find_examples(
    image: Image,
    objcgs: Set[int],
    memcgs: Set[int],
    kinds: Set[ChargeKind],
    coverage: defaultdict[str, Coverage],
) -> Examples:
    """
    Find some charges of given payers, and all their user pages.

    :param objcgs: payers, ``struct obj_cgroup *``
    :param memcgs: payers, ``struct mem_cgroup *``
    :param kinds: kinds of charges to find
    :param coverage: counts what was read, by subject
    """
    examples = Examples()
    found: list[Iterable[tuple[Entry, int]]] = []
    if not kinds.isdisjoint({"lru", "slab", "kmem", "sock"}):
        found.append(_pages(image, objcgs, memcgs, examples, coverage))
    if "percpu" in kinds:
        found.append(_percpu(image, objcgs))
    if "zswap" in kinds:
        found.append(_zswap(image, objcgs))
    for some in found:
        for entry, address in some:
            if len(examples.addresses[entry]) < MOST:
                examples.addresses[entry].append(address)
    return examples


def _pages(
    image: Image,
    objcgs: Set[int],
    memcgs: Set[int],
    examples: Examples,
    coverage: defaultdict[str, Coverage],
) -> Iterator[tuple[Entry, int]]:
    slabs, frames, uses = SlabReader(image), mem_map(image), page_uses(image, coverage)
    others = compound_pages_of_others(image, coverage["compound"])
    socks, payers = SockReader(image, slabs), objcgs | memcgs
    blocks = BlockReader(image)
    for piece in scan_pages(image):
        if piece.raw is None:
            why = STOPPED if image.progress.stop else "not in the image"
            coverage["folios"].miss("struct pages", piece.unreadable or 0, why)
            continue
        coverage["folios"].read += piece.pages
        for folio in folios_of(image, piece.raw, payers):
            _add(examples, folio, frames.virt(folio.page))
        for page in piece.slabs:
            slab = slabs.slab(page)
            if slab is None:
                continue  # collect() has counted it
            yield from _objects(slabs, slab, objcgs)
            for sock in socks.read(slab, memcgs):
                yield Entry(sock.memcg, "sock", sock.protocol, NUMA_NO_NODE), sock.address
        for kmem in piece.kmem:
            if kmem.objcg in objcgs:
                detail = "other" if kmem.page in others else uses.of(kmem, blocks)[0]
                yield Entry(kmem.objcg, "kmem", detail, kmem.nid), frames.virt(kmem.page)


def _add(examples: Examples, folio: Folio, address: int) -> None:
    group = examples.folios[folio.payer, folio.nid, folio.mapping, folio.swap_cache]
    group.folios += 1
    group.pages += 1 << folio.order
    if len(group.addresses) < MOST:
        group.addresses.append(address)


def _objects(slabs: SlabReader, slab: Slab, objcgs: Set[int]) -> Iterator[tuple[Entry, int]]:
    if not slab.charged or objcgs.isdisjoint(slab.charged):
        return
    detail = "reclaimable" if slab.cache.reclaimable else "unreclaimable"
    for obj in slabs.charged_objects(slab):
        if obj.objcg in objcgs:
            yield Entry(obj.objcg, "slab", detail, slab.nid), obj.address


def _percpu(image: Image, objcgs: Set[int]) -> Iterator[tuple[Entry, int]]:
    reader = PercpuReader(image)
    for chunk in reader.chunks():
        for alloc in reader.charged(chunk):
            if alloc.objcg in objcgs:
                for nid in reader.data_nodes(alloc):
                    yield Entry(alloc.objcg, "percpu", "", nid), reader.pointer(alloc)


def _zswap(image: Image, objcgs: Set[int]) -> Iterator[tuple[Entry, int]]:
    kept = kept_zswap(image)
    if kept is not None:
        for known, addresses in kept.found.items():
            if known.payer in objcgs:
                yield from ((known, address) for address in addresses)
        return
    reader, page_size = ZswapReader(image), mem_map(image).page_size
    for entry in reader.entries():
        # Of one that is being stored, the obj_cgroup may be anything.
        if entry.listed and entry.objcg in objcgs:
            detail = "incompressible" if entry.length == page_size else "compressed"
            for nid in reader.nodes(entry):
                yield Entry(entry.objcg, "zswap", detail, nid), entry.address
