# SPDX-License-Identifier: LGPL-2.1-or-later
"""Find charges that may explain findings, in a second pass over the pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from memcg_inspect.checks.evidence_query import Candidates, EvidenceQuery, Rank
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import KmemPage, PagePiece, page_layout, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.report import Evidence

__all__ = ("find_evidence",)


def find_evidence(
    image: Image, snapshot: Snapshot, queries: Iterable[EvidenceQuery]
) -> dict[EvidenceQuery, Candidates]:
    """Read the image again, and find the charges that each query describes."""
    return _Search(image, snapshot, queries).run()


class _Search:
    """A search for the charges of all queries, in one pass over each kind of charge."""

    def __init__(self, image: Image, snapshot: Snapshot, queries: Iterable[EvidenceQuery]) -> None:
        self.image = image
        self.snapshot = snapshot
        self.found = {query: Candidates() for query in queries}
        #: The queries for charges of one kind to one payer. Most charges have none.
        self._wanted: defaultdict[str, defaultdict[int, list[EvidenceQuery]]]
        self._wanted = defaultdict(lambda: defaultdict(list))
        for query in self.found:
            for payer in query.payers:
                self._wanted[query.kind][payer].append(query)

    def run(self) -> dict[EvidenceQuery, Candidates]:
        """Return the charges of each query."""
        if self._wanted.keys() & {"slab", "kmem", "lru"}:
            slabs = SlabReader(self.image)
            for piece in scan_pages(self.image):
                if "slab" in self._wanted:
                    self._slabs(slabs, piece)
                if "kmem" in self._wanted:
                    self._kmem(piece)
                if "lru" in self._wanted:
                    self._user_pages(piece)
        if "percpu" in self._wanted:
            self._percpu()
        if "zswap" in self._wanted:
            self._zswap()
        return self.found

    def _of(self, kind: str, payer: int) -> Iterable[EvidenceQuery]:
        """Return the queries for charges of a kind to an obj_cgroup."""
        return self._wanted[kind].get(payer, ())

    def _add(self, evidence: Evidence) -> None:
        """Add a charge to the queries that it fits."""
        size = evidence.bytes or 0
        for query in self._of(evidence.kind, evidence.objcg or 0):
            if query.fits(size, nid=evidence.nid):
                self.found[query].add(Rank(query.explains(size)), [evidence])

    def _slabs(self, slabs: SlabReader, piece: PagePiece) -> None:
        for page in piece.slabs:
            slab = slabs.slab(page)
            if slab is None or not slab.charged:
                continue
            cache = slab.cache
            detail = "reclaimable" if cache.reclaimable else "unreclaimable"
            # A query may be for several of the payers in a slab.
            for query in {q: None for objcg in slab.charged for q in self._of("slab", objcg)}:
                if query.fits(cache.charge, detail, slab.nid):
                    rank, number = query.in_slab(slab.charged, cache.charge)
                    self.found[query].add(rank, self._objects(slabs, slab, query), number)

    def _objects(self, slabs: SlabReader, slab: Slab, query: EvidenceQuery) -> Iterator[Evidence]:
        for obj in slabs.charged_objects(slab):
            if obj.objcg in query.payers:
                yield Evidence(
                    address=obj.address,
                    kind="slab",
                    nid=slab.nid,
                    bytes=slab.cache.charge,
                    cache=slab.cache.name,
                    page=slab.page,
                    objcg=obj.objcg,
                    memcg=self.snapshot.payer(obj.objcg),
                    note=f"objcg at {obj.element:#x}",
                )

    def _kmem(self, piece: PagePiece) -> None:
        frames = mem_map(self.image)
        for page in piece.kmem:
            if self._of("kmem", page.objcg):
                self._add(self._page(page, frames.page_size << page.order, frames.virt(page.page)))

    def _page(self, page: KmemPage, size: int, address: int) -> Evidence:
        return Evidence(
            address=address,
            kind="kmem",
            nid=page.nid,
            bytes=size,
            page=page.page,
            objcg=page.objcg,
            memcg=self.snapshot.payer(page.objcg),
            note=page.type or None,
        )

    def _user_pages(self, piece: PagePiece) -> None:
        raw, wanted = piece.raw, self._wanted["lru"]
        if raw is None or wanted.keys().isdisjoint(lru.payer for lru in piece.lru):
            return
        frames = mem_map(self.image)
        words = self.image.memory.words(raw.data, page_layout(self.image).memcg_data, frames.size)
        for i, word in enumerate(words):
            # memcg_data of a user page has no flags, so it is the obj_cgroup itself.
            if word in wanted:
                page = raw.page + i * frames.size
                self._add(
                    Evidence(
                        address=frames.virt(page),
                        kind="lru",
                        nid=raw.nid(i),
                        bytes=frames.page_size << raw.orders.get(i, 0),
                        page=page,
                        objcg=word,
                        memcg=self.snapshot.payer(word),
                    )
                )

    def _percpu(self) -> None:
        reader = PercpuReader(self.image)
        for chunk in reader.chunks():
            for alloc in reader.charged(chunk):
                self._add(
                    Evidence(
                        address=chunk.base + alloc.offset,
                        kind="percpu",
                        bytes=reader.charge(alloc),
                        objcg=alloc.objcg,
                        memcg=self.snapshot.payer(alloc.objcg),
                        note=f"{alloc.size} bytes for each CPU, objcg at {alloc.element:#x}",
                    )
                )

    def _zswap(self) -> None:
        for entry in ZswapReader(self.image).entries():
            self._add(
                Evidence(
                    address=entry.address,
                    kind="zswap",
                    bytes=entry.length,
                    objcg=entry.objcg,
                    memcg=self.snapshot.payer(entry.objcg),
                )
            )
