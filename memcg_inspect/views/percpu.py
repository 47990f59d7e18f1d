# SPDX-License-Identifier: LGPL-2.1-or-later
"""Percpu allocations: how large, whose, on which nodes, and made where in the code."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.alloc_tag import read_call_sites, read_left_behind, why_not_profiled
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.model import NUMA_NO_NODE, CallSite
from memcg_inspect.tables import Answer, Column, NotRead, Table, Value
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "percpu")

_WHOSE = (
    Column("memcg", "memcg", "memcg that pays; none for what no memcg pays for"),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
)
_WHAT = (
    Column("size", "bytes", "bytes of one allocation for one CPU"),
    Column("nodes", "text", "nodes of the pages behind it"),
    Column("bytes", "bytes", "bytes for all possible CPUs", total=True),
    Column(
        "charged",
        "bytes",
        "charged, with what says who pays for each four bytes of a CPU",
        total=True,
    ),
)
GROUP_COLUMNS = (
    *_WHOSE,
    *_WHAT[:2],
    Column("count", "count", "allocations that are alike in all this", total=True),
    *_WHAT[2:],
)
EACH_COLUMNS = (
    *_WHOSE,
    Column("pointer", "address", "the __percpu pointer (with --each)"),
    *_WHAT,
    Column("objcg", "address", "struct obj_cgroup * (with --each)", shown=False),
    Column("chunk", "address", "struct pcpu_chunk * (with --each)", shown=False),
)
SITE_COLUMNS = (Column("site", "text", "line of code that allocated it, if that is profiled"),)
NODE_COLUMNS = (
    Column("node", "node", "node of the pages behind percpu memory"),
    Column("backing", "bytes", "bytes of these pages", total=True),
    Column(
        "allocated",
        "bytes",
        "bytes of them that are allocated, the kernel's static variables among them",
        total=True,
    ),
    Column("paid", "bytes", "bytes of them that memcgs pay for", total=True),
)

_ORPHAN = NotRead("charged to an obj_cgroup that is not there, or not in the image")
_NO_NODE = NotRead("the node of some page could not be found")
#: For whom a charge counts whose obj_cgroup is not known; no address is 0.
_NOBODY_KNOWN = 0


class _Found(NamedTuple):
    """
    An allocation.

    :ivar payer: ``struct mem_cgroup *``; ``None`` if nobody pays
    :ivar nodes: bytes by node
    """

    alloc: PcpuArea
    payer: int | None
    nodes: Mapping[int, int]
    charged: int
    pointer: int


def percpu(image: Image, each: bool = False) -> Answer:
    """
    Return percpu allocations by the memcg that pays, size, nodes, and call site if known.

    :param each: list every one, with its address
    """
    payers, reader, info = Payers(image), PercpuReader(image), image_info(image)
    found = list(_found(payers, reader))
    payers.coverage["percpu"], payers.coverage["percpu_nodes"] = reader.coverage, reader.placement
    made = _made_at(image, payers, found)
    columns = EACH_COLUMNS if each else GROUP_COLUMNS
    nodes = tuple(
        Column(f"node_{nid}", "bytes", f"of the bytes, those on node {nid}", total=True)
        for nid in info.nodes
    )
    rows = sorted((_each if each else _groups)(payers, found, made, info.nodes), key=_order)
    if made is None:
        rows = [row[:-1] for row in rows]
    table = Table(
        "percpu",
        "percpu allocations",
        (*columns, *nodes, *(SITE_COLUMNS if made is not None else ())),
        rows,
    )
    by_node = Table("nodes", "percpu memory of nodes", NODE_COLUMNS, list(_nodes(reader, found)))
    return Answer("percpu", info, (table, by_node), dict(payers.coverage), _notes(reader))


def _found(payers: Payers, reader: PercpuReader) -> Iterator[_Found]:
    known: dict[int, int] = {}
    for chunk in reader.chunks():
        for alloc in reader.allocations(chunk):
            payer = None
            if alloc.objcg:
                if alloc.objcg not in known:
                    known[alloc.objcg] = payers.payer(alloc.objcg) or _NOBODY_KNOWN
                payer = known[alloc.objcg]
            charged = reader.charge(alloc) if alloc.objcg else 0
            yield _Found(alloc, payer, reader.data_nodes(alloc), charged, reader.pointer(alloc))


def _made_at(
    image: Image, payers: Payers, found: Iterable[_Found]
) -> Mapping[int, CallSite] | None:
    """Return the call sites by ``struct codetag *``; ``None`` if allocations have none."""
    if why_not_profiled(image) is not None:
        return None
    sites = read_call_sites(image, payers.coverage["call_sites"])
    unknown = {f.alloc.codetag for f in found} - sites.keys()
    return sites | read_left_behind(image, unknown, payers.coverage["call_sites"])


def _notes(reader: PercpuReader) -> tuple[str, ...]:
    notes = []
    if reader.static_size is not None:
        notes.append(
            "The kernel's static percpu variables, and what is reserved for those of modules, "
            f"take {reader.static_size:,} bytes of each CPU: they are no allocations, but are "
            "part of what is allocated of each node."
        )
    if reader.coverage.unreadable:
        notes.append("Allocations whose chunk or obj_cgroup is not in the image are missing here.")
    return tuple(notes)


def _whose(payers: Payers, payer: int | None) -> tuple[Value, Value]:
    return _ORPHAN if payer == _NOBODY_KNOWN else payers.path(payer), payer or None


def _node_list(nodes: Iterable[int]) -> str:
    return ",".join("?" if nid == NUMA_NO_NODE else str(nid) for nid in sorted(nodes))


def _by_node(sizes: Mapping[int, int], nodes: Iterable[int]) -> tuple[Value, ...]:
    if NUMA_NO_NODE in sizes:
        return tuple(_NO_NODE for _ in nodes)
    return tuple(sizes.get(nid, 0) for nid in nodes)


def _site(alloc: PcpuArea, made: Mapping[int, CallSite] | None) -> str | None:
    site = (made or {}).get(alloc.codetag)
    return None if site is None else f"{site.site} {site.function}"


def _groups(
    payers: Payers,
    found: Iterable[_Found],
    made: Mapping[int, CallSite] | None,
    nodes: Iterable[int],
) -> Iterator[tuple[Value, ...]]:
    groups: dict[tuple[int | None, int, str, str | None], list[_Found]] = {}
    for one in found:
        key = one.payer, one.alloc.size, _node_list(one.nodes), _site(one.alloc, made)
        groups.setdefault(key, []).append(one)
    for (payer, size, where, site), group in groups.items():
        sizes: Counter[int] = Counter()
        for one in group:
            sizes.update(one.nodes)
        yield (
            *_whose(payers, payer), size, where, len(group), sizes.total(),
            sum(one.charged for one in group), *_by_node(sizes, nodes), site,
        )  # fmt: skip


def _each(
    payers: Payers,
    found: Iterable[_Found],
    made: Mapping[int, CallSite] | None,
    nodes: Iterable[int],
) -> Iterator[tuple[Value, ...]]:
    for one in found:
        yield (
            *_whose(payers, one.payer), one.pointer, one.alloc.size, _node_list(one.nodes),
            sum(one.nodes.values()), one.charged, one.alloc.objcg or None,
            one.alloc.chunk.address, *_by_node(one.nodes, nodes), _site(one.alloc, made),
        )  # fmt: skip


def _order(row: tuple[Value, ...]) -> tuple[object, ...]:
    # Memcgs by their paths, then those that are not known, then what nobody pays for.
    path = row[0]
    rank = 0 if isinstance(path, str) else 1 if path is not None else 2
    return rank, str(path), row[1] or 0, row[2], str(row[3]), str(row[-1])


def _nodes(reader: PercpuReader, found: Iterable[_Found]) -> Iterator[tuple[Value, ...]]:
    paid: Counter[int] = Counter()
    for one in found:
        if one.payer is not None:
            paid.update(one.nodes)
    for nid in sorted(reader.pages):
        backing = reader.pages[nid] * mem_map(reader.image).page_size
        yield (nid, backing, reader.allocated[nid], paid[nid])


def _run(image: Image, args: Namespace) -> Answer:
    return percpu(image, args.each)


VIEW = View(
    name="percpu",
    help="percpu allocations by owner, size and node",
    description="Groups percpu allocations by the memcg that pays, by size and by the nodes of "
    "the pages behind them; with allocation profiling, by the line of code, too.",
    run=_run,
    arguments=(
        Argument(
            ("--each",), {"action": "store_true", "help": "list every allocation, with its address"}
        ),
    ),
)
