# SPDX-License-Identifier: LGPL-2.1-or-later
"""Percpu allocations: size, owner, nodes and call site."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.alloc_tag import read_call_sites, read_left_behind, why_not_profiled
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.model import NUMA_NO_NODE, CallSite
from memcg_inspect.tables import Answer, Field, MemcgAddress, NotRead, Table, Value, columns_of
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "NodeRow", "PercpuRow", "percpu")


@dataclass(frozen=True)
class PercpuRow:
    """Percpu allocations of one memcg, size, nodes and call site; with ``--each``, one of them."""

    memcg: Annotated[Value, Field("memcg", "memcg that pays; none if no memcg pays")]
    memcg_address: MemcgAddress
    pointer: Annotated[Value, Field("address", "the __percpu pointer (with --each)")]
    size: Annotated[int, Field("bytes", "size of one allocation for one CPU")]
    nodes: Annotated[str, Field("text", "nodes of the pages that back it")]
    count: Annotated[
        int, Field("count", "allocations of this memcg, size, nodes and call site", total=True)
    ]
    bytes: Annotated[int, Field("bytes", "size for all possible CPUs", total=True)]
    charged: Annotated[
        int,
        Field(
            "bytes",
            "bytes charged, including an obj_cgroup pointer for each four bytes of one copy",
            total=True,
        ),
    ]
    objcg: Annotated[Value, Field("address", "struct obj_cgroup * (with --each)", shown=False)]
    chunk: Annotated[Value, Field("address", "struct pcpu_chunk * (with --each)", shown=False)]
    by_node: Annotated[
        Mapping[int, Value],
        Field("bytes", "bytes on node {}", total=True, each="node_{}"),
    ]
    site: Annotated[
        Value, Field("text", "line of code that allocated it, with allocation profiling")
    ]


@dataclass(frozen=True)
class NodeRow:
    """Percpu memory of one node."""

    node: Annotated[int, Field("node", "node of the pages that back percpu memory")]
    backing: Annotated[int, Field("bytes", "size of these pages", total=True)]
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

#: Fields that apply only with ``--each``, and only without.
_EACH, _GROUPED = ("pointer", "objcg", "chunk"), ("count",)


class _Found(NamedTuple):
    """
    One allocation.

    :ivar payer: ``struct mem_cgroup *``; ``None`` if no memcg pays
    :ivar nodes: bytes by node
    """

    alloc: PcpuArea
    payer: int | None
    nodes: Mapping[int, int]
    charged: int
    pointer: int


def percpu(image: Image, each: bool = False) -> Answer:
    """
    Return percpu allocations by memcg, size, nodes, and, if it is known, call site.

    :param each: whether to list every allocation, with its address
    """
    payers, reader, info = Payers(image), PercpuReader(image), image_info(image)
    found = list(_found(payers, reader))
    payers.coverage["percpu"], payers.coverage["percpu_nodes"] = reader.coverage, reader.placement
    made = _made_at(image, payers, found)
    rows = _each(payers, found, made, info.nodes)
    if not each:
        rows = _groups(payers, found, made, info.nodes)
    omit = (*(_GROUPED if each else _EACH), *(() if made is not None else ("site",)))
    columns = columns_of(PercpuRow, keys=info.nodes, omit=omit)
    table = Table("percpu", "percpu allocations", columns, sorted(rows, key=_order))
    nodes = list(_nodes(reader, found))
    by_node = Table("nodes", "percpu memory of nodes", columns_of(NodeRow), nodes)
    return Answer("percpu", info, (table, by_node), dict(payers.coverage), _notes(reader))


def _found(payers: Payers, reader: PercpuReader) -> Iterator[_Found]:
    known: dict[int, int] = {}
    for chunk in reader.chunks():
        for alloc in reader.allocations(chunk):
            payer = None
            if alloc.objcg:
                if alloc.objcg not in known:
                    known[alloc.objcg] = payers.payer(alloc.objcg) or _UNKNOWN_PAYER
                payer = known[alloc.objcg]
            charged = reader.charge(alloc) if alloc.objcg else 0
            yield _Found(alloc, payer, reader.data_nodes(alloc), charged, reader.pointer(alloc))


def _made_at(
    image: Image, payers: Payers, found: Iterable[_Found]
) -> Mapping[int, CallSite] | None:
    """Return call sites by ``struct codetag *``; ``None`` without allocation profiling."""
    if why_not_profiled(image) is not None:
        return None
    sites = read_call_sites(image, payers.coverage["call_sites"])
    unknown = {f.alloc.codetag for f in found} - sites.keys()
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


def _site(alloc: PcpuArea, made: Mapping[int, CallSite] | None) -> str | None:
    site = (made or {}).get(alloc.codetag)
    return None if site is None else f"{site.site} {site.function}"


def _groups(
    payers: Payers,
    found: Iterable[_Found],
    made: Mapping[int, CallSite] | None,
    nodes: Iterable[int],
) -> Iterator[PercpuRow]:
    groups: dict[tuple[int | None, int, str, str | None], list[_Found]] = {}
    for one in found:
        key = one.payer, one.alloc.size, _node_list(one.nodes), _site(one.alloc, made)
        groups.setdefault(key, []).append(one)
    for (payer, size, where, site), group in groups.items():
        sizes: Counter[int] = Counter()
        for one in group:
            sizes.update(one.nodes)
        memcg, address = _whose(payers, payer)
        yield PercpuRow(
            memcg=memcg,
            memcg_address=address,
            pointer=None,
            size=size,
            nodes=where,
            count=len(group),
            bytes=sizes.total(),
            charged=sum(one.charged for one in group),
            objcg=None,
            chunk=None,
            by_node=_by_node(sizes, nodes),
            site=site,
        )


def _each(
    payers: Payers,
    found: Iterable[_Found],
    made: Mapping[int, CallSite] | None,
    nodes: Iterable[int],
) -> Iterator[PercpuRow]:
    for one in found:
        memcg, address = _whose(payers, one.payer)
        yield PercpuRow(
            memcg=memcg,
            memcg_address=address,
            pointer=one.pointer,
            size=one.alloc.size,
            nodes=_node_list(one.nodes),
            count=1,
            bytes=sum(one.nodes.values()),
            charged=one.charged,
            objcg=one.alloc.objcg or None,
            chunk=one.alloc.chunk.address,
            by_node=_by_node(one.nodes, nodes),
            site=_site(one.alloc, made),
        )


def _order(row: PercpuRow) -> tuple[object, ...]:
    # Memcgs by path, then unknown ones, then what no memcg pays for.
    rank = 0 if isinstance(row.memcg, str) else 1 if row.memcg is not None else 2
    what = (row.pointer or 0, row.size, row.nodes, str(row.site))
    return rank, str(row.memcg), row.memcg_address or 0, *what


def _nodes(reader: PercpuReader, found: Iterable[_Found]) -> Iterator[NodeRow]:
    paid: Counter[int] = Counter()
    for one in found:
        if one.payer is not None:
            paid.update(one.nodes)
    for nid in sorted(reader.pages):
        backing = reader.pages[nid] * mem_map(reader.image).page_size
        yield NodeRow(nid, backing, reader.allocated[nid], paid[nid])


def _run(image: Image, args: Namespace) -> Answer:
    return percpu(image, args.each)


VIEW = View(
    name="percpu",
    help="percpu allocations by owner, size and node",
    description="Groups percpu allocations by the memcg that pays, by size, and by the nodes of "
    "the pages that back them; with allocation profiling also by the line of code.",
    run=_run,
    records=(PercpuRow, NodeRow),
    arguments=(
        Argument(
            ("--each",), {"action": "store_true", "help": "list every allocation, with its address"}
        ),
    ),
)
