# SPDX-License-Identifier: LGPL-2.1-or-later
"""Slab objects by memcg and cache, and the slabs that memcgs share."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.collect.slab_cells import (
    LARGE_KMALLOC,
    UNKNOWN_PAYER,
    SlabCell,
    SlabCells,
    SlabKey,
)
from memcg_inspect.collect.slab_walk import read_slabs
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.tables import Answer, Field, MemcgAddress, NotRead, Table, Value, columns_of
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View, by_argument, named, narrowed_by

__all__ = ("VIEW", "NodeRow", "SlabRow", "slabinfo")


@dataclass(frozen=True)
class SlabRow:
    """Objects of one slab cache that one memcg pays for; with ``--by``, by the fields chosen."""

    memcg: Annotated[Value, Field("memcg", "memcg that pays; none if no memcg pays")]
    memcg_address: MemcgAddress
    cache: Annotated[str | None, Field("text", "name of the cache", priority=9)]
    cache_address: Annotated[int | None, Field("address", "struct kmem_cache *", shown=False)]
    node: Annotated[int | None, Field("node", "node of the slabs", priority=9)]
    reclaimable: Annotated[
        bool | None, Field("flag", "whether it counts as reclaimable slab memory", priority=2)
    ]
    size: Annotated[int | None, Field("bytes", "size of an object in the slab", priority=4)]
    objects: Annotated[
        Value,
        Field(
            "count",
            "objects charged to the memcg. In rows without a memcg: objects in use that are not "
            "charged, including free objects in per-CPU caches. Large kmallocs that "
            "are not charged are not counted",
            total=True,
            priority=8,
        ),
    ]
    bytes: Annotated[
        Value, Field("bytes", "size of these objects", total=True, priority=9, shares=True)
    ]
    charged: Annotated[
        Value,
        Field(
            "bytes",
            "bytes charged for these objects: size and one pointer per object",
            total=True,
            priority=6,
        ),
    ]
    slabs: Annotated[Value, Field("count", "slabs that contain any of these objects")]
    slab_bytes: Annotated[Value, Field("bytes", "size of these slabs")]
    shared: Annotated[
        Value,
        Field("count", "slabs among these that also contain objects of other memcgs", priority=3),
    ]
    others: Annotated[Value, Field("count", "other memcgs with objects in these slabs", priority=3)]
    utilisation: Annotated[
        Value, Field("share", "share of the space in these slabs that the objects take", priority=6)
    ]


@dataclass(frozen=True)
class NodeRow:
    """Slab memory of one node."""

    node: Annotated[int, Field("node", "node of the slabs")]
    kind: Annotated[
        str, Field("text", "reclaimable or unreclaimable slabs, or large kmallocs", priority=9)
    ]
    slab_bytes: Annotated[Value, Field("bytes", "size of the slabs", total=True, shares=True)]
    paid: Annotated[Value, Field("bytes", "bytes in objects that memcgs pay for", total=True)]
    unpaid: Annotated[
        Value,
        Field(
            "bytes",
            "bytes in other objects in use, including free ones in per-CPU caches",
            total=True,
        ),
    ]
    unused: Annotated[Value, Field("bytes", "bytes in no object in use", total=True)]


_ORPHAN = NotRead("charged to an obj_cgroup that does not exist or is not in the image")
_UNKNOWN = NotRead("the obj_cgroups of some slabs are not in the image")
_OTHERS = NotRead("other users of compound pages are not all in the image")


#: The dimensions of ``--by``, and the fields that sums over all of it do not have.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "memcg": ("memcg", "memcg_address", "shared", "others"),
    "cache": ("cache", "cache_address", "reclaimable", "size"),
    "node": ("node",),
}
#: In place of a cache: large kmallocs of any size.
_ALL_LARGE = 0


class _Walk(NamedTuple):
    """The slabs of an image."""

    payers: Payers
    found: SlabCells


class _Tally:
    """
    Sums of slabs by some of :data:`DIMENSIONS`.

    :ivar cells: sums by what is told apart
    :ivar unknown: rows without a memcg that belong to slabs whose obj_cgroups could not be read
    """

    def __init__(self, walk: _Walk, by: Collection[str]) -> None:
        self.payers, self.found = walk
        self.by = by
        self.cells: dict[SlabKey, SlabCell] = {}
        self.unknown = {self._key(None, *key) for key in self.found.unread}
        by_memcg = "memcg" in by
        for (payer, cache, nid), cell in self.found.cells.items():
            large = cell.has_large and not by_memcg
            to = self._cell(payer, _ALL_LARGE if large else cache, nid)
            to.merge_objects(cell)
            if by_memcg or large:
                to.merge_slabs(cell)
        if not by_memcg:
            for key, cell in self.found.unread.items():
                if cell.objects:
                    self._cell(None, *key).merge_objects(cell)
            for key, cell in self.found.slabs.items():
                self._cell(None, *key).merge_slabs(cell)

    def _key(self, payer: int | None, cache: int | None, nid: int | None) -> SlabKey:
        return SlabKey(
            payer if "memcg" in self.by else None,
            cache if "cache" in self.by else None,
            nid if "node" in self.by else None,
        )

    def _cell(self, payer: int | None, cache: int | None, nid: int | None) -> SlabCell:
        return self.cells.setdefault(self._key(payer, cache, nid), SlabCell())

    def unpaid_large(self) -> None:
        """Add the large kmallocs that no memcg pays for."""
        for nid, cell in self.found.unpaid_large().items():
            to = self._cell(None, _ALL_LARGE, nid)
            to.merge_objects(cell)
            to.merge_slabs(cell)

    @property
    def may_be_others(self) -> bool:
        """Whether other compound pages may have been counted as large kmallocs."""
        if page_layout(self.payers.image).has_large_kmalloc:
            return False
        owners = ("compound", "vmalloc", "stacks")
        return any(self.payers.coverage[owner].unreadable for owner in owners)


def slabinfo(image: Image, by_node: bool = False, by: Collection[str] | None = None) -> Answer:
    """
    Return slab objects by memcg and cache, or by any of :data:`DIMENSIONS`, largest first.

    :param by_node: whether to split rows by node, too
    :param by: dimensions; with any, and if rows are split by node, objects that no memcg pays for
        are included
    """
    chosen = {*(by or ("memcg", "cache")), *(["node"] if by_node else [])}
    wanted = [name for name in DIMENSIONS if name in chosen]
    walk = image.keep(_walk)
    tally, coverage = _Tally(walk, wanted), walk.payers.coverage
    if by or "node" in wanted:
        tally.unpaid_large()
    rows = sorted((_row(tally, key, cell) for key, cell in tally.cells.items()), key=_order)
    if not by and "node" not in wanted:
        rows = [row for row in rows if row.memcg is not None]
    tables: tuple[Table, ...] = ()
    if "node" in wanted:
        nodes = list(_node_rows(tally))
        tables = (Table("nodes", "slab memory of nodes", columns_of(NodeRow), nodes),)
    omit = [field for name in DIMENSIONS if name not in wanted for field in DIMENSIONS[name]]
    title = f"slab objects by {named(wanted)}"
    contents = "all objects" if by or "node" in wanted else "charged objects"
    columns = columns_of(SlabRow, omit=omit)
    first = Table("slabinfo", title, columns, rows, is_ranked=True, contents=contents)
    return Answer("slabinfo", image_info(image), (first, *tables), dict(coverage), _notes(tally))


def _walk(image: Image) -> _Walk:
    payers = Payers(image)
    return _Walk(payers, read_slabs(image, payers.payer, payers.coverage))


def _notes(tally: _Tally) -> tuple[str, ...]:
    notes = []
    if not page_layout(tally.payers.image).has_large_kmalloc:
        notes.append(
            "This kernel does not mark large kmallocs. Charged compound pages of no other known "
            "use are counted as large kmallocs; those that no memcg pays for are not found."
        )
    if tally.unknown:
        notes.append("Objects in slabs whose obj_cgroups are not in the image are missing here.")
    return tuple(notes)


def _row(tally: _Tally, key: SlabKey, cell: SlabCell) -> SlabRow:
    cache = tally.found.caches.get(key.cache or 0)
    is_large = key.cache is not None and key.cache <= _ALL_LARGE
    row = SlabRow(
        memcg=_ORPHAN if key.payer == UNKNOWN_PAYER else tally.payers.path(key.payer),
        memcg_address=key.payer or None,
        cache=LARGE_KMALLOC if is_large else None if cache is None else cache.name,
        cache_address=None if cache is None else cache.address,
        node=key.nid,
        reclaimable=False if is_large else None if cache is None else cache.reclaimable,
        size=-(key.cache or 0) or None if cache is None else cache.size,
        objects=cell.objects,
        bytes=cell.bytes,
        charged=cell.charged,
        slabs=cell.slabs,
        slab_bytes=cell.pages * mem_map(tally.payers.image).page_size,
        shared=cell.shared,
        others=len(cell.others - {key.payer, None}),
        utilisation=cell.in_slabs / cell.room if cell.room else None,
    )
    if is_large and cell.has_uncounted:
        row = replace(row, objects=None, slabs=None, shared=None, others=None, utilisation=None)
    if key in tally.unknown and "memcg" in tally.by:
        row = replace(row, objects=_UNKNOWN, bytes=_UNKNOWN)
    elif key in tally.unknown:
        row = replace(row, charged=_UNKNOWN)
    if cell.has_large and tally.may_be_others:
        unknown = dict.fromkeys(("objects", "bytes", "charged", "slabs", "slab_bytes"), _OTHERS)
        row = replace(row, **unknown)  # type: ignore[arg-type]
    return row


def _order(row: SlabRow) -> tuple[object, ...]:
    # The largest first, what is not known last. Among equal ones: memcgs by path, then unknown
    # ones, then what no memcg pays for.
    size = (0, -row.bytes) if isinstance(row.bytes, int) else (1, 0)
    rank = 0 if isinstance(row.memcg, str) else 1 if row.memcg is not None else 2
    what = (row.cache or "", row.cache_address or 0, row.size or 0)
    return *size, rank, str(row.memcg), row.memcg_address or 0, *what, row.node or 0


def _node_rows(tally: _Tally) -> Iterator[NodeRow]:
    marked = page_layout(tally.payers.image).has_large_kmalloc
    for (nid, kind), found in sorted(tally.found.nodes.items()):
        size, paid = found["slab_bytes"], found["paid"]
        parts: tuple[Value, ...] = (size, paid, found["unpaid"], size - paid - found["unpaid"])
        if kind == LARGE_KMALLOC:
            parts = (size, paid, size - paid, 0) if marked else (paid, paid, None, None)
            if tally.may_be_others:
                parts = (_OTHERS, _OTHERS, None, None)
        if found["unknown"]:
            parts = (size, _UNKNOWN, _UNKNOWN, _UNKNOWN)
        yield NodeRow(nid, kind, *parts)


def _run(image: Image, args: Namespace) -> Answer:
    by = args.by and [*args.by, *narrowed_by(args)]
    return slabinfo(image, args.by_node or bool(args.node), by)


VIEW = View(
    name="slabinfo",
    description="Lists for each memcg and slab cache the objects, their bytes, the slabs that "
    "hold them, and how many other memcgs share these slabs; the largest first.",
    run=_run,
    records=(SlabRow, NodeRow),
    arguments=(
        by_argument(DIMENSIONS),
        Argument(
            ("--by-node",),
            {
                "action": "store_true",
                "help": "split by node, too, and include objects that no memcg pays for, as --by "
                "does (--node implies it)",
            },
        ),
    ),
    choices=("memcg", "node", "sort", "fields", "top"),
)
