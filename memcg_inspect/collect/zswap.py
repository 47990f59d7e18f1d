# SPDX-License-Identifier: LGPL-2.1-or-later
"""Zswap entries into the ledger: by who pays, which depends on the kernel's accounting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.collect.bynode import ByNode
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.zswap import ZswapEntry, ZswapReader
from memcg_inspect.model import NUMA_NO_NODE, Misplaced, Objcg

__all__ = ("add_zswap",)


class _Piece(NamedTuple):
    """Some bytes of an entry: the obj_cgroup that pays for them, and the node they are on."""

    payer: int
    nid: int
    bytes: int


def add_zswap(
    ledger: Ledger,
    reader: ZswapReader,
    objcgs: Mapping[int, Objcg],
    by_node: ByNode | None,
    charged: bool,
) -> Counter[int]:
    """
    Add all entries that a memcg pays for.

    :param by_node: for kernels that account by node
    :param charged: whether their bytes are charged; on cgroup v1 an entry only holds its
        obj_cgroup
    :return: references beyond the one that each entry has on the obj_cgroup it names
    """
    page_size = mem_map(reader.image).page_size
    references: Counter[int] = Counter()
    for entry in reader.entries():
        objcg = objcgs.get(entry.objcg)
        if not entry.objcg or (objcg is not None and objcg.is_root):
            continue
        detail = "incompressible" if entry.length == page_size else "compressed"
        nodes = reader.nodes(entry) or {NUMA_NO_NODE: 0}
        pieces = [_Piece(entry.objcg, nid, size) for nid, size in nodes.items()]
        if by_node is not None and objcg is not None:
            pieces = _by_node(by_node, entry, objcg, nodes) or pieces
            if entry.beyond:
                references[by_node.payer(entry.objcg, entry.beyond_nid)] += 1
        charges = 1
        for payer, nid, size in pieces:
            ledger.add(Entry(payer, "zswap", detail, nid), size if charged else 0, charges)
            charges = 0
    return references


def _by_node(
    by_node: ByNode, entry: ZswapEntry, objcg: Objcg, nodes: Mapping[int, int]
) -> list[_Piece]:
    """
    Find who pays for each part of an entry.

    The obj_cgroup that an entry names is that of the node in which its data began when it was
    stored, by either rule. One that was moved since has left both.
    """
    first, *rest = nodes
    if first == NUMA_NO_NODE:
        return []
    stayed = not entry.beyond or nodes.get(entry.beyond_nid) == entry.beyond
    if objcg.nid == first and stayed:
        pieces = [_Piece(by_node.payer(entry.objcg, nid), nid, nodes[nid]) for nid in rest]
        pieces.insert(0, _Piece(entry.objcg, first, nodes[first]))
        physical = {(payer, nid): size for payer, nid, size in pieces}
        by_node.compare("zswap", entry.address, physical, {(entry.objcg, first): entry.length})
        return pieces
    pieces = list(_as_recorded(by_node, entry, nodes))
    for payer, nid, size in pieces:
        known = by_node.objcgs.get(payer)
        if known is not None and known.nid != nid:
            by_node.misplaced.append(Misplaced("zswap", entry.address, payer, known.nid, nid, size))
    return pieces


def _as_recorded(by_node: ByNode, entry: ZswapEntry, nodes: Mapping[int, int]) -> Iterator[_Piece]:
    """Lay what the entry says of who pays over where its data is, from its first byte on."""
    paid = [[entry.objcg, entry.length - entry.beyond]]
    if entry.beyond:
        paid.append([by_node.payer(entry.objcg, entry.beyond_nid), entry.beyond])
    for nid, size in nodes.items():
        while size:
            part = min(size, paid[0][1])
            yield _Piece(paid[0][0], nid, part)
            size -= part
            paid[0][1] -= part
            if not paid[0][1]:
                paid.pop(0)
