# SPDX-License-Identifier: LGPL-2.1-or-later
"""Find charges that may explain findings, in a second pass over the pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from memcg_inspect.checks.evidence_query import MOST_EVIDENCE, EvidenceQuery, most_likely
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import KmemPage, PagePiece, page_layout, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.report import Evidence

__all__ = ("find_evidence",)

#: (rank, evidence). The charge with the highest rank is the most likely cause.
Ranked = tuple[int, Evidence]


def find_evidence(
    image: Image, snapshot: Snapshot, queries: Iterable[EvidenceQuery]
) -> dict[EvidenceQuery, Sequence[Evidence]]:
    """
    Read the image again and find the most likely charges for each query.

    :return: evidence by query, most likely first
    """
    queries = list(queries)
    ranked: dict[EvidenceQuery, list[Ranked]] = {s: [] for s in queries}

    def add(query: EvidenceQuery, found: Iterable[Ranked]) -> None:
        ranked[query] = most_likely([*ranked[query], *found])

    slabs = SlabReader(image)
    if any(s.kind in ("slab", "kmem", "lru") for s in queries):
        for piece in scan_pages(image):
            read = [slabs.slab(page) for page in piece.slabs]
            for query in queries:
                if query.kind == "slab":
                    for slab in read:
                        if slab is not None and _may_hold(slab, query):
                            add(query, _slab_objects(slabs, slab, query, snapshot))
                else:
                    add(query, _pages(image, piece, query, snapshot))
    for query in queries:
        if query.kind == "percpu":
            add(query, _percpu(image, query, snapshot))
        elif query.kind == "zswap":
            add(query, _zswap(image, query, snapshot))
    return {s: [evidence for _, evidence in found] for s, found in ranked.items()}


def _may_hold(slab: Slab, query: EvidenceQuery) -> bool:
    detail = "reclaimable" if slab.cache.reclaimable else "unreclaimable"
    if query.payers.isdisjoint(slab.charged or ()):
        return False
    return query.fits(slab.cache.charge, detail, slab.nid)


def _slab_objects(
    slabs: SlabReader, slab: Slab, query: EvidenceQuery, snapshot: Snapshot
) -> Iterator[Ranked]:
    charged = slab.charged or {}
    neighbours = sum(n for objcg, n in charged.items() if objcg in query.neighbours)
    rank = query.rank(slab.cache.charge, neighbours)
    # All objects of a slab have the same rank, and a slab may have thousands.
    objects = (obj for obj in slabs.charged_objects(slab) if obj.objcg in query.payers)
    for obj in islice(objects, MOST_EVIDENCE):
        yield (
            rank,
            Evidence(
                address=obj.address,
                kind="slab",
                nid=slab.nid,
                bytes=slab.cache.charge,
                cache=slab.cache.name,
                page=slab.page,
                objcg=obj.objcg,
                memcg=snapshot.payer(obj.objcg),
                note=f"objcg at {obj.element:#x}",
            ),
        )


def _pages(
    image: Image, piece: PagePiece, query: EvidenceQuery, snapshot: Snapshot
) -> Iterator[Ranked]:
    if query.kind == "lru":
        yield from _user_pages(image, piece, query, snapshot)
    if query.kind != "kmem":
        return
    frames = mem_map(image)
    for page in piece.kmem:
        size = frames.page_size << page.order
        if page.objcg in query.payers and query.fits(size, nid=page.nid):
            yield query.rank(size), _page(page, size, frames.virt(page.page), snapshot)


def _user_pages(
    image: Image, piece: PagePiece, query: EvidenceQuery, snapshot: Snapshot
) -> Iterator[Ranked]:
    raw, frames = piece.raw, mem_map(image)
    if raw is None or query.payers.isdisjoint(lru.payer for lru in piece.lru):
        return
    words = image.memory.words(raw.data, page_layout(image).memcg_data, frames.size)
    for i, word in enumerate(words):
        nid = raw.nid(i)
        size = frames.page_size << raw.orders.get(i, 0)
        # memcg_data of a user page has no flags, so it is the obj_cgroup itself.
        if word in query.payers and query.fits(size, nid=nid):
            page = raw.page + i * frames.size
            yield (
                query.rank(size),
                Evidence(
                    address=frames.virt(page),
                    kind="lru",
                    nid=nid,
                    bytes=size,
                    page=page,
                    objcg=word,
                    memcg=snapshot.payer(word),
                ),
            )


def _page(page: KmemPage, size: int, address: int, snapshot: Snapshot) -> Evidence:
    return Evidence(
        address=address,
        kind="kmem",
        nid=page.nid,
        bytes=size,
        page=page.page,
        objcg=page.objcg,
        memcg=snapshot.payer(page.objcg),
        note=page.type or None,
    )


def _percpu(image: Image, query: EvidenceQuery, snapshot: Snapshot) -> Iterator[Ranked]:
    reader = PercpuReader(image)
    for chunk in reader.chunks():
        for alloc in reader.charged(chunk):
            size = reader.charge(alloc)
            if alloc.objcg in query.payers and query.fits(size):
                yield (
                    query.rank(size),
                    Evidence(
                        address=chunk.base + alloc.offset,
                        kind="percpu",
                        bytes=size,
                        objcg=alloc.objcg,
                        memcg=snapshot.payer(alloc.objcg),
                        note=f"{alloc.size} bytes for each CPU, objcg at {alloc.element:#x}",
                    ),
                )


def _zswap(image: Image, query: EvidenceQuery, snapshot: Snapshot) -> Iterator[Ranked]:
    for entry in ZswapReader(image).entries():
        if entry.objcg in query.payers and query.divides in (0, entry.length):
            yield (
                1,
                Evidence(
                    address=entry.address,
                    kind="zswap",
                    bytes=entry.length,
                    objcg=entry.objcg,
                    memcg=snapshot.payer(entry.objcg),
                ),
            )
