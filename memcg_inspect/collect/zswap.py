# SPDX-License-Identifier: LGPL-2.1-or-later
"""Add zswap entries to the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.collect.pernode import PerNode, ZswapShare
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.zswap import ZswapReader
from memcg_inspect.model import NUMA_NO_NODE, Objcg

__all__ = ("ZswapAdded", "ZswapExamples", "add_zswap")


class ZswapAdded(NamedTuple):
    """
    What was found of zswap and is not in the ledger.

    :ivar references: references by ``struct obj_cgroup *``, beyond the one that each entry holds to
        the obj_cgroup that it names
    :ivar unlisted: entries that are on no LRU list, ``struct zswap_entry *``
    """

    references: Counter[int]
    unlisted: list[int]


class ZswapExamples:
    """
    Some zswap entries of each obj_cgroup.

    :ivar found: ``struct zswap_entry *`` by entry of the ledger
    """

    #: Number of addresses that are kept for each entry of the ledger.
    MOST = 3

    def __init__(self) -> None:
        self.found: dict[Entry, list[int]] = {}

    def add(self, entry: Entry, address: int) -> None:
        """Add one of an entry of the ledger."""
        known = self.found.setdefault(entry, [])
        if len(known) < self.MOST:
            known.append(address)


def add_zswap(
    ledger: Ledger,
    reader: ZswapReader,
    objcgs: Mapping[int, Objcg],
    per_node: PerNode | None,
    charged: bool,
    examples: ZswapExamples | None = None,
) -> ZswapAdded:
    """
    Add all zswap entries that a memcg pays for, except those that are on no LRU list.

    Such an entry may not have been charged yet, and may not say who pays for it.

    :param per_node: splits a charge by node; ``None`` on kernels that charge one obj_cgroup for all
        nodes
    :param charged: whether their bytes are charged. On cgroup v1 an entry only holds a
        reference to its obj_cgroup.
    :param examples: if given, entries are added to it
    """
    page_size = mem_map(reader.image).page_size
    references: Counter[int] = Counter()
    unlisted: list[int] = []
    for entry in reader.entries():
        if not entry.listed:
            unlisted.append(entry.address)
            continue
        objcg = objcgs.get(entry.objcg)
        if not entry.objcg or (objcg is not None and objcg.is_root):
            continue
        detail = "incompressible" if entry.length == page_size else "compressed"
        nodes = reader.nodes(entry)
        if examples is not None:
            for nid in nodes:
                examples.add(Entry(entry.objcg, "zswap", detail, nid), entry.address)
        nodes = nodes or {NUMA_NO_NODE: 0}
        if per_node is None:
            shares = [ZswapShare(entry.objcg, nid, size) for nid, size in nodes.items()]
        else:
            shares = per_node.zswap(entry, nodes)
            second = per_node.second_payer(entry)
            if second is not None:
                references[second] += 1
        charges = 1
        for payer, nid, size in shares:
            ledger.add(Entry(payer, "zswap", detail, nid), size if charged else 0, charges)
            charges = 0
    if reader.coverage.unreadable:
        ledger.note_missing("zswap")
    return ZswapAdded(references, unlisted)
