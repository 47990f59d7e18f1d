# SPDX-License-Identifier: LGPL-2.1-or-later
"""Find the charges that findings ask for, in a second pass over the pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.suspects import Suspect, most_likely
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import KmemPage, PagePiece, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.model import Evidence

__all__ = ("find_evidence",)

#: (rank, evidence). The charge with the highest rank is the most likely cause.
Ranked = tuple[int, Evidence]


def find_evidence(
    image: Image, snapshot: Snapshot, suspects: Iterable[Suspect]
) -> dict[Suspect, Sequence[Evidence]]:
    """Read the image again, for the charges that findings ask for."""
    suspects = list(suspects)
    ranked: dict[Suspect, list[Ranked]] = {s: [] for s in suspects}

    def add(suspect: Suspect, found: Iterable[Ranked]) -> None:
        ranked[suspect] = most_likely([*ranked[suspect], *found])

    slabs = SlabReader(image)
    if any(s.kind in ("slab", "kmem", "lru") for s in suspects):
        for piece in scan_pages(image):
            read = [slabs.slab(page) for page in piece.slabs]
            for suspect in suspects:
                if suspect.kind == "slab":
                    for slab in read:
                        if slab is not None and _may_hold(slab, suspect):
                            add(suspect, _slab_objects(slabs, slab, suspect, snapshot))
                else:
                    add(suspect, _pages(image, piece, suspect, snapshot))
    for suspect in suspects:
        if suspect.kind == "percpu":
            add(suspect, _percpu(image, suspect, snapshot))
        elif suspect.kind == "zswap":
            add(suspect, _zswap(image, suspect, snapshot))
    return {s: [evidence for _, evidence in found] for s, found in ranked.items()}


def _may_hold(slab: Slab, suspect: Suspect) -> bool:
    detail = "reclaimable" if slab.cache.reclaimable else "unreclaimable"
    if suspect.payers.isdisjoint(slab.charged or ()):
        return False
    return suspect.fits(slab.cache.charge, detail, slab.nid)


def _slab_objects(
    slabs: SlabReader, slab: Slab, suspect: Suspect, snapshot: Snapshot
) -> Iterator[Ranked]:
    charged = slab.charged or {}
    neighbours = sum(n for objcg, n in charged.items() if objcg in suspect.neighbours)
    rank = suspect.rank(slab.cache.charge, neighbours)
    for thing in slabs.charged_objects(slab):
        if thing.objcg in suspect.payers:
            yield (
                rank,
                Evidence(
                    address=thing.address,
                    kind="slab",
                    nid=slab.nid,
                    bytes=slab.cache.charge,
                    cache=slab.cache.name,
                    page=slab.page,
                    objcg=thing.objcg,
                    memcg=snapshot.payer(thing.objcg),
                    note=f"objcg at {thing.element:#x}",
                ),
            )


def _pages(
    image: Image, piece: PagePiece, suspect: Suspect, snapshot: Snapshot
) -> Iterator[Ranked]:
    if suspect.kind != "kmem":
        return
    frames = mem_map(image)
    for page in piece.kmem:
        size = frames.page_size << page.order
        if page.objcg in suspect.payers and suspect.fits(size, nid=page.nid):
            yield suspect.rank(size), _page(page, size, frames.virt(page.page), snapshot)


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


def _percpu(image: Image, suspect: Suspect, snapshot: Snapshot) -> Iterator[Ranked]:
    reader = PercpuReader(image)
    for chunk in reader.chunks():
        for alloc in reader.charged(chunk):
            size = reader.charge(alloc)
            if alloc.objcg in suspect.payers and suspect.fits(size):
                yield (
                    suspect.rank(size),
                    Evidence(
                        address=chunk.base + alloc.offset,
                        kind="percpu",
                        bytes=size,
                        objcg=alloc.objcg,
                        memcg=snapshot.payer(alloc.objcg),
                        note=f"{alloc.size} bytes for each CPU, objcg at {alloc.element:#x}",
                    ),
                )


def _zswap(image: Image, suspect: Suspect, snapshot: Snapshot) -> Iterator[Ranked]:
    for entry in ZswapReader(image).entries():
        if entry.objcg in suspect.payers and suspect.divides in (0, entry.length):
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
