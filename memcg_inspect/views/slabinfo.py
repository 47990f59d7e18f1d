# SPDX-License-Identifier: LGPL-2.1-or-later
"""Whose slab objects there are, by memcg and cache, and who shares slabs with whom."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.collect.page_uses import PageUses
from memcg_inspect.image.image import Image
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import KmemPage, PagePiece, page_layout, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.tables import Answer, Column, NotRead, Table, Value
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "slabinfo")

LARGE_KMALLOC = "(large kmalloc)"

COLUMNS = (
    Column("memcg", "memcg", "memcg that pays; none for objects that no memcg pays for"),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
    Column("cache", "text", "name of the cache"),
    Column("cache_address", "address", "struct kmem_cache *", shown=False),
    Column("node", "node", "node of the slabs"),
    Column("reclaimable", "flag", "whether it counts as reclaimable slab memory"),
    Column("size", "bytes", "bytes that an object takes"),
    Column(
        "objects",
        "count",
        "how many are charged to it; of those that nobody pays for, how many are taken from "
        "their slabs, free ones that CPUs hold ready among them",
        total=True,
    ),
    Column("bytes", "bytes", "bytes that they take", total=True),
    Column("charged", "bytes", "bytes charged for them: a pointer more for each", total=True),
    Column("slabs", "count", "slabs that hold any of them"),
    Column("slab_bytes", "bytes", "bytes of the pages of the slabs"),
    Column("shared", "count", "slabs among these that hold objects of somebody else, too"),
    Column("others", "count", "other memcgs that these slabs are shared with"),
    Column("utilisation", "share", "share of the room in these slabs that the objects take"),
)

NODE_COLUMNS = (
    Column("node", "node", "node of the slabs"),
    Column("kind", "text", "reclaimable or unreclaimable slabs, or large kmallocs"),
    Column("slab_bytes", "bytes", "bytes of the pages of the slabs", total=True),
    Column("paid", "bytes", "bytes of them in objects that memcgs pay for", total=True),
    Column("unpaid", "bytes", "bytes of them in other objects taken from the slabs", total=True),
    Column("unused", "bytes", "bytes of them in no object that is taken", total=True),
)

_ORPHAN = NotRead("charged to an obj_cgroup that is not there, or not in the image")
_UNKNOWN = NotRead("the obj_cgroups of some slabs are not in the image")
_OTHERS = NotRead("what else uses compound pages is not all in the image")
#: For whom a charge counts whose obj_cgroup is not known; no address is 0.
_NOBODY_KNOWN = 0


class _Key(NamedTuple):
    """
    What a row is about.

    :ivar payer: ``struct mem_cgroup *``; ``None`` if nobody pays
    :ivar cache: ``struct kmem_cache *``, or less than 0: the size of large kmallocs
    """

    payer: int | None
    cache: int
    nid: int | None


@dataclass
class _Cell:
    """
    What a row adds up.

    :ivar apart: objects that are in no slab of the cache, but in the pool of kfence
    """

    objects: int = 0
    apart: int = 0
    slabs: int = 0
    pages: int = 0
    room: int = 0
    shared: int = 0
    others: set[int | None] = field(default_factory=set)


class _Tally:
    """Adds slabs up by who pays for their objects."""

    def __init__(self, payers: Payers, by_node: bool) -> None:
        self.payers = payers
        self.by_node = by_node
        self.cells: dict[_Key, _Cell] = {}
        #: By node and kind: pages, and bytes of objects that are paid for, and that are not.
        self.nodes: dict[tuple[int, str], Counter[str]] = {}
        #: Caches and nodes of slabs whose owners could not be read.
        self.unknown: set[tuple[int, int | None]] = set()
        self.caches: dict[int, SlabCache] = {}
        self._kfence = kfence_pages(payers.image)
        self._page_size = mem_map(payers.image).page_size
        self._payers: dict[int, int] = {}

    def _payer(self, objcg: int) -> int:
        payer = self._payers.get(objcg)
        if payer is None:
            payer = self._payers[objcg] = self.payers.payer(objcg) or _NOBODY_KNOWN
        return payer

    def _cell(self, payer: int | None, cache: int, nid: int) -> _Cell:
        key = _Key(payer, cache, nid if self.by_node else None)
        return self.cells.setdefault(key, _Cell())

    def _node(self, nid: int, kind: str) -> Counter[str]:
        return self.nodes.setdefault((nid, kind), Counter())

    def slab(self, slab: Slab) -> None:
        """Add a slab."""
        cache, owners = slab.cache, Counter[int | None]()
        self.caches[cache.address] = cache
        for objcg, count in (slab.charged or {}).items():
            owners[self._payer(objcg)] += count
        if slab.page in self._kfence:
            # It is in no counter of slabs, and does not say whether its object is in use.
            for payer, count in owners.items():
                self._cell(payer, cache.address, slab.nid).apart += count
            return
        kind = "reclaimable" if cache.reclaimable else "unreclaimable"
        node, pages = self._node(slab.nid, kind), 1 << slab.order
        node["slab_bytes"] += pages * self._page_size
        if slab.charged is None:
            self.unknown.add((cache.address, slab.nid if self.by_node else None))
            node["unknown"] += 1
            return
        paid = owners.total()
        if slab.inuse > paid:
            owners[None] = slab.inuse - paid
        node["paid"] += paid * cache.size
        node["unpaid"] += owners[None] * cache.size
        owners = +owners
        for payer, count in owners.items():
            cell = self._cell(payer, cache.address, slab.nid)
            cell.objects += count
            cell.slabs += 1
            cell.pages += pages
            cell.room += slab.objects
            if len(owners) > 1:
                cell.shared += 1
                cell.others |= owners.keys()

    def large(self, kmem: KmemPage, pages: int) -> None:
        """Add a large kmalloc that a memcg pays for."""
        cell = self._cell(self._payer(kmem.objcg), -pages * self._page_size, kmem.nid)
        cell.objects += 1
        cell.slabs += 1
        cell.pages += pages
        cell.room += 1
        self._node(kmem.nid, LARGE_KMALLOC)["paid"] += pages * self._page_size

    @property
    def may_be_others(self) -> bool:
        """Whether pages of others may have been taken for large kmallocs."""
        if page_layout(self.payers.image).has_large_kmalloc:
            return False
        owners = ("compound", "vmalloc", "stacks", "page_tables")
        return any(self.payers.coverage[owner].unreadable for owner in owners)

    def all_large(self, piece: PagePiece) -> None:
        """Add the pages of all large kmallocs, where these are marked."""
        for nid, pages in piece.large_kmalloc.items():
            self._node(nid, LARGE_KMALLOC)["slab_bytes"] += pages * self._page_size


def slabinfo(image: Image, by_node: bool = False) -> Answer:
    """
    Return slab objects by the memcg that pays and by cache.

    :param by_node: by node, too, and with the objects that no memcg pays for
    """
    payers = Payers(image)
    coverage = payers.coverage
    uses, tally = PageUses(image, coverage), _Tally(payers, by_node)
    slabs = SlabReader(image, coverage["names"])
    for piece in scan_pages(image):
        coverage["pages"].read += piece.pages
        if piece.unreadable is not None:
            why = STOPPED if image.progress.stop else "not in the image"
            coverage["pages"].miss("struct pages", piece.unreadable, why)
        for page in piece.slabs:
            slab = slabs.slab(page)
            if slab is not None:
                tally.slab(slab)
        for kmem in piece.kmem:
            use, pages = uses.of(kmem)
            if use == "large_kmalloc":
                tally.large(kmem, pages)
        tally.all_large(piece)
    coverage["slab"] = slabs.coverage
    rows = sorted(_rows(tally), key=_order)
    columns: tuple[Column, ...] = COLUMNS
    tables: tuple[Table, ...] = ()
    if by_node:
        tables = (Table("nodes", "slab memory of nodes", NODE_COLUMNS, list(_node_rows(tally))),)
    else:
        at = next(i for i, column in enumerate(COLUMNS) if column.name == "node")
        columns = COLUMNS[:at] + COLUMNS[at + 1 :]
        rows = [row[:at] + row[at + 1 :] for row in rows if row[0] is not None]
    first = Table("slabinfo", "slab objects by memcg and cache", columns, rows)
    return Answer("slabinfo", image_info(image), (first, *tables), dict(coverage), _notes(tally))


def _notes(tally: _Tally) -> tuple[str, ...]:
    notes = []
    if not page_layout(tally.payers.image).has_large_kmalloc:
        notes.append(
            "This kernel does not mark large kmallocs: compound pages that are charged, and that "
            "nothing else is known to use, are taken for them; those that no memcg pays for are "
            "not found."
        )
    if tally.unknown:
        notes.append("Objects of slabs whose obj_cgroups are not in the image are missing here.")
    return tuple(notes)


def _rows(tally: _Tally) -> Iterator[tuple[Value, ...]]:
    page_size = mem_map(tally.payers.image).page_size
    for key, cell in tally.cells.items():
        cache, objects = tally.caches.get(key.cache), cell.objects + cell.apart
        what: tuple[Value, ...] = (LARGE_KMALLOC, None, key.nid, False)
        size = charge = -key.cache
        if cache is not None:
            what = (cache.name, cache.address, key.nid, cache.reclaimable)
            size, charge = cache.size, cache.charge
        counts: tuple[Value, ...] = (objects, objects * size, objects * charge)
        if key.payer is None:
            is_known = (key.cache, key.nid) not in tally.unknown
            counts = (objects, objects * size, 0) if is_known else (_UNKNOWN, _UNKNOWN, 0)
        counts += (cell.slabs, cell.pages * page_size)
        if cache is None and tally.may_be_others:
            counts = (_OTHERS,) * len(counts)
        yield (
            _ORPHAN if key.payer == _NOBODY_KNOWN else tally.payers.path(key.payer),
            key.payer or None, *what, size, *counts,
            cell.shared, len(cell.others - {key.payer, None}),
            cell.objects / cell.room if cell.room else None,
        )  # fmt: skip
    for (nid, kind), found in tally.nodes.items():
        unpaid = found["slab_bytes"] - found["paid"]
        if kind == LARGE_KMALLOC and tally.by_node and unpaid > 0:
            yield (
                None, None, LARGE_KMALLOC, None, nid, False, None, None, unpaid, 0,
                None, unpaid, None, None, None,
            )  # fmt: skip


def _order(row: tuple[Value, ...]) -> tuple[object, ...]:
    # Memcgs by their paths, then those that are not known, then what nobody pays for.
    path, size = row[0], row[8]
    rank = 0 if isinstance(path, str) else 1 if path is not None else 2
    return rank, str(path), row[1] or 0, -(size if isinstance(size, int) else 0), row[2], row[4]


def _node_rows(tally: _Tally) -> Iterator[tuple[Value, ...]]:
    marked = page_layout(tally.payers.image).has_large_kmalloc
    for (nid, kind), found in sorted(tally.nodes.items()):
        size, paid = found["slab_bytes"], found["paid"]
        parts: tuple[Value, ...] = (size, paid, found["unpaid"], size - paid - found["unpaid"])
        if kind == LARGE_KMALLOC:
            parts = (size, paid, size - paid, 0) if marked else (paid, paid, None, None)
            if tally.may_be_others:
                parts = (_OTHERS, _OTHERS, None, None)
        if found["unknown"]:
            parts = (size, _UNKNOWN, _UNKNOWN, _UNKNOWN)
        yield (nid, kind, *parts)


def _run(image: Image, args: Namespace) -> Answer:
    return slabinfo(image, args.by_node or args.node is not None)


VIEW = View(
    name="slabinfo",
    help="slab objects by memcg and cache, and how slabs are shared",
    description="Lists what each memcg has of each slab cache: objects, bytes, the slabs they are "
    "spread over, and how many others these are shared with.",
    run=_run,
    arguments=(
        Argument(
            ("--by-node",),
            {
                "action": "store_true",
                "help": "by node, too, and with the objects that no memcg pays for "
                "(--node does so as well)",
            },
        ),
    ),
)
