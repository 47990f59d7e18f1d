# SPDX-License-Identifier: LGPL-2.1-or-later
"""Zswap entries into the ledger: by who pays, which depends on the kernel's accounting."""

from __future__ import annotations

from collections.abc import Mapping

from memcg_inspect.audit.ledger import Entry, Ledger
from memcg_inspect.collect.bynode import ByNode
from memcg_inspect.linux.mmzone import mem_map
from memcg_inspect.linux.zswap import ZswapEntry, ZswapReader
from memcg_inspect.model import NUMA_NO_NODE, Misplaced, Objcg

__all__ = ("add_zswap",)


def add_zswap(
    ledger: Ledger,
    reader: ZswapReader,
    objcgs: Mapping[int, Objcg],
    by_node: ByNode | None,
    charged: bool,
) -> None:
    """
    Add all entries that a memcg pays for.

    :param by_node: for kernels that account by node
    :param charged: whether their bytes are charged; on cgroup v1 an entry only holds its
        obj_cgroup
    """
    page_size = mem_map(reader.prog).page_size
    for entry in reader.entries():
        objcg = objcgs.get(entry.objcg)
        if not entry.objcg or (objcg is not None and objcg.is_root):
            continue
        detail = "incompressible" if entry.length == page_size else "compressed"
        nodes = reader.nodes(entry) or {NUMA_NO_NODE: 0}
        payers = dict.fromkeys(nodes, entry.objcg)
        if by_node is not None and objcg is not None:
            payers |= _others(by_node, entry, objcg, nodes)
        charges = 1
        for nid, size in nodes.items():
            ledger.add(Entry(payers[nid], "zswap", detail, nid), size if charged else 0, charges)
            charges = 0


def _others(
    by_node: ByNode, entry: ZswapEntry, objcg: Objcg, nodes: Mapping[int, int]
) -> dict[int, int]:
    """
    Find who pays for what does not lie on an entry's first node.

    The obj_cgroup that an entry names is that of the node in which its data begins, by either
    rule. One that was moved since it was charged has left both.

    :return: obj_cgroups by node
    """
    first, *rest = nodes
    if first == NUMA_NO_NODE:
        return {}
    if objcg.nid != first:
        by_node.misplaced.append(
            Misplaced("zswap", entry.address, objcg.address, objcg.nid, first, entry.length)
        )
        return {}
    payers = {nid: by_node.payer(entry.objcg, nid) for nid in rest}
    physical = {(payers.get(nid, entry.objcg), nid): size for nid, size in nodes.items()}
    by_node.compare("zswap", entry.address, physical, {(entry.objcg, first): entry.length})
    return payers
