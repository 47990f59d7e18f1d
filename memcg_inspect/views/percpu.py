# SPDX-License-Identifier: LGPL-2.1-or-later
"""Percpu allocations: size, owner, nodes and call site."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.alloc_tag import read_call_sites, read_left_behind, why_not_profiled
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.model import NUMA_NO_NODE, CallSite, ImageError
from memcg_inspect.tables import (
    Answer,
    Column,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    UsageError,
    Value,
    columns_of,
)
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View, by_argument, named, narrowed_by

__all__ = ("VIEW", "NodeRow", "PercpuRow", "percpu")


@dataclass(frozen=True, kw_only=True)
class PercpuRow:
    """
    Percpu allocations of one memcg, size, nodes and call site.

    With ``--each`` it is one of them, with ``--by`` those with the same fields that were chosen.
    """

    memcg: Annotated[
        Value, Field("memcg", "memcg that pays; none if no memcg pays", priority=9)
    ] = None
    memcg_address: MemcgAddress = None
    pointer: Annotated[
        Value, Field("address", "the __percpu pointer (with --each)", priority=8)
    ] = None
    size: Annotated[
        int | None, Field("bytes", "size of one allocation for one CPU", priority=7)
    ] = None
    nodes: Annotated[str | None, Field("text", "nodes of the pages that back it", priority=6)] = (
        None
    )
    node: Annotated[
        Value,
        Field("node", "node of the pages that back this part of it (with --by node)", priority=9),
    ] = None
    count: Annotated[
        int | None,
        Field(
            "count",
            "allocations in this row; with --by node those with a part on the node",
            total=True,
            priority=7,
        ),
    ] = None
    bytes: Annotated[
        int,
        Field(
            "bytes",
            "size for all possible CPUs; with --by node, on the node",
            total=True,
            priority=9,
            shares=True,
        ),
    ]
    charged: Annotated[
        int | None,
        Field(
            "bytes",
            "bytes charged, including an obj_cgroup pointer for each four bytes of one copy",
            total=True,
        ),
    ] = None
    objcg: Annotated[Value, Field("address", "struct obj_cgroup * (with --each)", shown=False)] = (
        None
    )
    chunk: Annotated[Value, Field("address", "struct pcpu_chunk * (with --each)", shown=False)] = (
        None
    )
    by_node: Annotated[
        Mapping[int, Value],
        Field("bytes", "bytes on node {}", total=True, each="node_{}", priority=4),
    ]
    site: Annotated[
        Value,
        Field("text", "line of code that allocated it, with allocation profiling", priority=8),
    ] = None


@dataclass(frozen=True)
class NodeRow:
    """Percpu memory of one node."""

    node: Annotated[int, Field("node", "node of the pages that back percpu memory")]
    backing: Annotated[int, Field("bytes", "size of these pages", total=True, shares=True)]
    allocated: Annotated[
        int,
        Field(
            "bytes",
            "bytes in these pages that are allocated, static variables included",
            total=True,
        ),
    ]
    paid: Annotated[int, Field("bytes", "bytes in these pages that memcgs pay for", total=True)]


_ORPHAN = NotRead("charged to an obj_cgroup that does not exist or is not in the image")
_NO_NODE = NotRead("the node of some page could not be read")
#: Payer of a charge whose obj_cgroup is not known; no memcg has this address.
_UNKNOWN_PAYER = 0

#: The dimensions of ``--by``, and the fields of each.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "memcg": ("memcg", "memcg_address"),
    "node": ("node",),
    "site": ("site",),
}
#: Fields that apply only with ``--each``, and only without.
_EACH, _GROUPED = ("pointer", "objcg", "chunk"), ("count",)


class _Found(NamedTuple):
    """
    Allocations that differ in their addresses only.

    :ivar payer: ``struct mem_cgroup *``; ``None`` if no memcg pays
    :ivar size: of one allocation for one CPU, in bytes
    :ivar nodes: bytes by node
    :ivar charged: bytes charged for one allocation
    :ivar codetag: ``struct codetag *`` of the call site
    """

    payer: int | None
    size: int
    nodes: tuple[tuple[int, int], ...]
    charged: int
    codetag: int


class _Walk(NamedTuple):
    """
    The percpu allocations of an image.

    :ivar found: number of allocations of each sort
    :ivar nodes: rows of the table of nodes
    :ivar made: call sites by ``struct codetag *``; ``None`` without allocation profiling
    """

    payers: Payers
    found: Mapping[_Found, int]
    nodes: Sequence[NodeRow]
    made: Mapping[int, CallSite] | None
    notes: tuple[str, ...]


def percpu(image: Image, each: bool = False, by: Collection[str] | None = None) -> Answer:
    """
    Return percpu allocations by memcg, size, nodes, and, if it is known, call site; largest first.

    :param each: whether to list every allocation, with its address
    :param by: any of :data:`DIMENSIONS`, to sum up by these instead
    :raises ImageError: if call sites are asked for, and allocations do not refer to them
    """
    if by and "site" in by and (reason := why_not_profiled(image)) is not None:
        raise ImageError(reason)
    info = image_info(image)
    areas: list[tuple[_Found, PcpuArea, int]] = []
    walk = _walk(image, areas) if each else image.keep(_walk)
    title = "percpu allocations"
    if by:
        wanted = [name for name in DIMENSIONS if name in by]
        rows = _sums(walk, info.nodes, wanted)
        columns = _columns(wanted, info.nodes)
        title += f" by {named(wanted)}"
    else:
        rows = _each(walk, areas, info.nodes) if each else _groups(walk, info.nodes)
        no_site = () if walk.made is not None else ("site",)
        omit = ("node", *(_GROUPED if each else _EACH), *no_site)
        columns = columns_of(PercpuRow, keys=info.nodes, omit=omit)
    table = Table("percpu", title, columns, sorted(rows, key=_order), is_ranked=True)
    by_node = Table("nodes", "percpu memory of nodes", columns_of(NodeRow), walk.nodes)
    return Answer("percpu", info, (table, by_node), dict(walk.payers.coverage), walk.notes)


def _walk(image: Image, areas: list[tuple[_Found, PcpuArea, int]] | None = None) -> _Walk:
    """
    Read all percpu allocations.

    :param areas: if given, each allocation is added to it, with its ``__percpu`` pointer
    """
    payers, reader = Payers(image), PercpuReader(image)
    found: Counter[_Found] = Counter()
    for alloc, payer in _allocations(payers, reader):
        charged = reader.charge(alloc) if alloc.objcg else 0
        nodes = tuple(reader.data_nodes(alloc).items())
        one = _Found(payer, alloc.size, nodes, charged, alloc.codetag)
        found[one] += 1
        if areas is not None:
            areas.append((one, alloc, reader.pointer(alloc)))
    payers.coverage["percpu"], payers.coverage["percpu_nodes"] = reader.coverage, reader.placement
    made = _made_at(image, payers, {one.codetag for one in found})
    return _Walk(payers, found, list(_nodes(reader, found)), made, _notes(reader))


def _columns(by: Collection[str], nodes: Iterable[int]) -> tuple[Column, ...]:
    names = {"count", "bytes", *(field for name in by for field in DIMENSIONS[name])}
    if "node" not in by:
        # An allocation is charged as a whole, not by node.
        return columns_of(PercpuRow, keys=nodes, only=names | {"charged", "by_node"})
    # It counts on each node that it has a part on, so the numbers do not add up.
    columns = columns_of(PercpuRow, only=names)
    return tuple(replace(c, total=c.total and c.name != "count") for c in columns)


def _allocations(payers: Payers, reader: PercpuReader) -> Iterator[tuple[PcpuArea, int | None]]:
    """Return each allocation, and the memcg that pays for it."""
    known: dict[int, int] = {}
    for chunk in reader.chunks():
        for alloc in reader.allocations(chunk):
            payer = None
            if alloc.objcg:
                if alloc.objcg not in known:
                    known[alloc.objcg] = payers.payer(alloc.objcg) or _UNKNOWN_PAYER
                payer = known[alloc.objcg]
            yield alloc, payer


def _made_at(image: Image, payers: Payers, codetags: Set[int]) -> Mapping[int, CallSite] | None:
    """Return call sites by ``struct codetag *``; ``None`` without allocation profiling."""
    if why_not_profiled(image) is not None:
        return None
    sites = read_call_sites(image, payers.coverage["call_sites"])
    unknown = set(codetags) - sites.keys()
    return sites | read_left_behind(image, unknown, payers.coverage["call_sites"])


def _notes(reader: PercpuReader) -> tuple[str, ...]:
    notes = []
    if reader.static_size is not None:
        notes.append(
            "Static percpu variables of the kernel, and the space reserved for those of modules, "
            f"take {reader.static_size:,} bytes for each CPU. They are not allocations, but the "
            "table of nodes counts them as allocated."
        )
    if reader.coverage.unreadable:
        notes.append("Allocations whose chunk or obj_cgroup is not in the image are missing here.")
    return tuple(notes)


def _whose(payers: Payers, payer: int | None) -> tuple[Value, int | None]:
    return _ORPHAN if payer == _UNKNOWN_PAYER else payers.path(payer), payer or None


def _node_list(nodes: Iterable[int]) -> str:
    return ",".join("?" if nid == NUMA_NO_NODE else str(nid) for nid in sorted(nodes))


def _by_node(sizes: Mapping[int, int], nodes: Iterable[int]) -> dict[int, Value]:
    if NUMA_NO_NODE in sizes:
        return dict.fromkeys(nodes, _NO_NODE)
    return {nid: sizes.get(nid, 0) for nid in nodes}


def _site(codetag: int, made: Mapping[int, CallSite] | None) -> str | None:
    site = (made or {}).get(codetag)
    return None if site is None else f"{site.site} {site.function}"


def _groups(walk: _Walk, nodes: Iterable[int]) -> Iterator[PercpuRow]:
    groups: dict[tuple[int | None, int, str, str | None], list[tuple[_Found, int]]] = {}
    for one, count in walk.found.items():
        where = _node_list(nid for nid, _ in one.nodes)
        key = one.payer, one.size, where, _site(one.codetag, walk.made)
        groups.setdefault(key, []).append((one, count))
    for (payer, size, where, site), group in groups.items():
        sizes: Counter[int] = Counter()
        for one, count in group:
            sizes.update({nid: count * part for nid, part in one.nodes})
        memcg, address = _whose(walk.payers, payer)
        yield PercpuRow(
            memcg=memcg,
            memcg_address=address,
            size=size,
            nodes=where,
            count=sum(count for _, count in group),
            bytes=sizes.total(),
            charged=sum(count * one.charged for one, count in group),
            by_node=_by_node(sizes, nodes),
            site=site,
        )


def _sums(walk: _Walk, nodes: Iterable[int], by: Collection[str]) -> Iterator[PercpuRow]:
    """Yield sums by any of :data:`DIMENSIONS`."""
    sizes: defaultdict[tuple[int | None, str | None, int | None], Counter[int]]
    sizes = defaultdict(Counter)
    counts, charged = Counter[object](), Counter[object]()
    for one, count in walk.found.items():
        payer = one.payer if "memcg" in by else None
        site = _site(one.codetag, walk.made) if "site" in by else None
        keys = {(payer, site, nid if "node" in by else None) for nid, _ in one.nodes}
        for key in keys or ({(payer, site, None)} if "node" not in by else ()):
            counts[key] += count
            charged[key] += count * one.charged
            on = {nid: count * part for nid, part in one.nodes if key[2] in (None, nid)}
            sizes[key].update(on)
    for key, parts in sizes.items():
        payer, site, on_node = key
        memcg, address = _whose(walk.payers, payer)
        yield PercpuRow(
            memcg=memcg,
            memcg_address=address,
            node=_NO_NODE if on_node == NUMA_NO_NODE else on_node,
            count=counts[key],
            bytes=parts.total(),
            charged=charged[key],
            by_node=_by_node(parts, nodes),
            site=site,
        )


def _each(
    walk: _Walk, areas: Iterable[tuple[_Found, PcpuArea, int]], nodes: Iterable[int]
) -> Iterator[PercpuRow]:
    for one, alloc, pointer in areas:
        memcg, address = _whose(walk.payers, one.payer)
        sizes = dict(one.nodes)
        yield PercpuRow(
            memcg=memcg,
            memcg_address=address,
            pointer=pointer,
            size=one.size,
            nodes=_node_list(sizes),
            bytes=sum(sizes.values()),
            charged=one.charged,
            objcg=alloc.objcg or None,
            chunk=alloc.chunk.address,
            by_node=_by_node(sizes, nodes),
            site=_site(one.codetag, walk.made),
        )


def _order(row: PercpuRow) -> tuple[object, ...]:
    # The largest first. Among equal ones: memcgs by path, then unknown ones, then what no memcg
    # pays for.
    rank = 0 if isinstance(row.memcg, str) else 1 if row.memcg is not None else 2
    what = (row.pointer or 0, row.size or 0, row.nodes or "", str(row.node), str(row.site))
    return -row.bytes, rank, str(row.memcg), row.memcg_address or 0, *what


def _nodes(reader: PercpuReader, found: Mapping[_Found, int]) -> Iterator[NodeRow]:
    paid: Counter[int] = Counter()
    for one, count in found.items():
        if one.payer is not None:
            paid.update({nid: count * part for nid, part in one.nodes})
    for nid in sorted(reader.pages):
        backing = reader.pages[nid] * mem_map(reader.image).page_size
        yield NodeRow(nid, backing, reader.allocated[nid], paid[nid])


def _run(image: Image, args: Namespace) -> Answer:
    if args.each and args.by:
        raise UsageError("--each cannot be combined with --by")
    return percpu(image, args.each, args.by and [*args.by, *narrowed_by(args)])


VIEW = View(
    name="percpu",
    description="Groups percpu allocations by the memcg that pays, by size, and by the nodes of "
    "the pages that back them; with allocation profiling also by the line of code. The largest "
    "come first.",
    run=_run,
    records=(PercpuRow, NodeRow),
    arguments=(
        by_argument(DIMENSIONS),
        Argument(
            ("--each",), {"action": "store_true", "help": "list every allocation, with its address"}
        ),
    ),
    choices=("memcg", "node", "sort", "fields", "top"),
)
