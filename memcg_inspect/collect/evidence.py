# SPDX-License-Identifier: LGPL-2.1-or-later
"""Find charges that may explain findings, in a second pass over the pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from memcg_inspect.checks.evidence_query import Candidates, EvidenceQuery, Rank
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.site import SiteFinder
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import KmemPage, PagePiece, page_layout, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.mm.zswap import ZswapEntry, ZswapReader
from memcg_inspect.model import CallSite
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
        self.sites = SiteFinder(image)
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

    def _add(
        self, kind: str, payer: int, size: int, nid: int | None, evidence: Callable[[], Evidence]
    ) -> None:
        """
        Add a charge to the queries that it fits.

        :param evidence: reads what is listed of it. Most charges are not listed.
        """
        for query in self._of(kind, payer):
            if query.fits(size, nid=nid):
                self.found[query].sizes[kind, size, payer] += 1
                self.found[query].add(Rank(query.explains(size)), (make() for make in [evidence]))

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
                    for objcg in slab.charged.keys() & query.payers:
                        key = "slab", cache.charge, objcg
                        self.found[query].sizes[key] += slab.charged[objcg]

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
                    site=_place(self.sites.of_slab_object(slab, obj.number)),
                )

    def _kmem(self, piece: PagePiece) -> None:
        frames = mem_map(self.image)
        for page in piece.kmem:
            if self._of("kmem", page.objcg):
                size = frames.page_size << page.order
                self._add("kmem", page.objcg, size, page.nid, partial(self._page, page, size))

    def _page(self, page: KmemPage, size: int) -> Evidence:
        return Evidence(
            address=mem_map(self.image).virt(page.page),
            kind="kmem",
            nid=page.nid,
            bytes=size,
            page=page.page,
            objcg=page.objcg,
            memcg=self.snapshot.payer(page.objcg),
            note=page.type or None,
            site=_place(self.sites.of_page(page.page)),
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
                size, nid = frames.page_size << raw.orders.get(i, 0), raw.nid(i)
                folio = partial(self._folio, raw.page + i * frames.size, word, nid, size)
                self._add("lru", word, size, nid, folio)

    def _folio(self, page: int, payer: int, nid: int, size: int) -> Evidence:
        return Evidence(
            address=mem_map(self.image).virt(page),
            kind="lru",
            nid=nid,
            bytes=size,
            page=page,
            objcg=payer,
            memcg=self.snapshot.payer(payer),
        )

    def _percpu(self) -> None:
        reader = PercpuReader(self.image)
        for chunk in reader.chunks():
            for area in reader.charged(chunk):
                size = reader.charge(area)
                listed = partial(self._area, area, chunk.base, size)
                self._add("percpu", area.objcg, size, None, listed)

    def _area(self, area: PcpuArea, base: int, size: int) -> Evidence:
        return Evidence(
            address=base + area.offset,
            kind="percpu",
            bytes=size,
            objcg=area.objcg,
            memcg=self.snapshot.payer(area.objcg),
            note=f"{area.size} bytes for each CPU, objcg at {area.element:#x}",
            site=_place(self.sites.of_percpu(area)),
        )

    def _zswap(self) -> None:
        for entry in ZswapReader(self.image).entries():
            self._add("zswap", entry.objcg, entry.length, None, partial(self._entry, entry))

    def _entry(self, entry: ZswapEntry) -> Evidence:
        return Evidence(
            address=entry.address,
            kind="zswap",
            bytes=entry.length,
            objcg=entry.objcg,
            memcg=self.snapshot.payer(entry.objcg),
        )


def _place(site: CallSite | None) -> str | None:
    return None if site is None else site.place
