# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Charges of kernels that account kernel memory by node
-----------------------------------------------------

Such a kernel splits the charge for a percpu allocation or a zswap entry by node. This module finds
the obj_cgroup that pays for each part. It records where the physical and the posted rule book
different bytes; see :mod:`memcg_inspect.linux.mm.pernode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from memcg_inspect.checks.ledger import Amount, Entry
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.linux.mm.pernode import accounts_by_node, posted_percpu_nodes, posted_zswap_nodes
from memcg_inspect.linux.mm.zswap import ZswapEntry
from memcg_inspect.model import NUMA_NO_NODE, Coverage, Misplaced, Objcg, PerNodeCharges, SplitKind

__all__ = ("PerNode", "ZswapShare", "per_node_of")

#: Bytes by (``struct obj_cgroup *``, node).
Booked = Mapping[tuple[int, int], int]


class ZswapShare(NamedTuple):
    """
    Part of a zswap entry that one obj_cgroup pays for.

    :ivar payer: ``struct obj_cgroup *``
    :ivar nid: node of the page that holds it
    :ivar bytes: size of the part
    """

    payer: int
    nid: int
    bytes: int


class PerNode:
    """Splits charges by node and finds the obj_cgroup that pays for each part."""

    def __init__(self, objcgs: Mapping[int, Objcg], is_whole: bool) -> None:
        """
        :param objcgs: all obj_cgroups that were read, by ``struct obj_cgroup *``
        :param is_whole: whether these are all obj_cgroups of the image. If not, the payer of a part
            may be unknown.
        """
        self._objcgs = objcgs
        self._is_whole = is_whole
        self._posted: dict[SplitKind, Counter[tuple[int, int]]] = {
            "percpu": Counter(),
            "zswap": Counter(),
        }
        self._straddling: list[Misplaced] = []
        self._misplaced: list[Misplaced] = []
        # Without siblings, the current obj_cgroups of the memcg pay for other nodes.
        self._current = {(o.memcg, o.nid): o.address for o in objcgs.values() if o.memcg_refs}

    def charges(self) -> PerNodeCharges:
        """Return the differences between the rules, for the charges that were split so far."""
        return PerNodeCharges(dict(self._posted), self._straddling, self._misplaced)

    def payer(self, objcg: int, nid: int) -> int:
        """
        Return the obj_cgroup that pays for the part of a charge on one node.

        :param objcg: ``struct obj_cgroup *`` that the charge names
        :return: ``struct obj_cgroup *``; 0 if it was not read
        """
        known = self._objcgs.get(objcg)
        if known is None:
            return objcg
        if 0 <= nid < len(known.siblings) and known.siblings[nid]:
            return known.siblings[nid]
        return self._current.get((known.memcg, nid), objcg if self._is_whole else 0)

    def percpu(self, reader: PercpuReader, area: PcpuArea) -> Iterator[tuple[Entry, Amount]]:
        """Split a percpu allocation. The node of a part can be ``NUMA_NO_NODE``."""
        data, metadata = reader.data_nodes(area), reader.metadata_nodes(area)
        posted = posted_percpu_nodes(reader, area)
        payers = {nid: self.payer(area.objcg, nid) for nid in {*data, *metadata, *posted}}
        for nid in data.keys() | metadata.keys():
            # The allocation holds one reference to each obj_cgroup, for data, metadata or both.
            if data[nid]:
                yield Entry(payers[nid], "percpu", "data", nid), Amount(data[nid], 1)
            if metadata[nid]:
                references = 0 if nid in data else 1
                yield (
                    Entry(payers[nid], "percpu", "metadata", nid),
                    Amount(metadata[nid], references),
                )
        self._compare(
            "percpu",
            area.element,
            {(payers[nid], nid): size for nid, size in data.items()},
            {(payers[nid], nid): size for nid, size in posted.items()},
        )

    def second_payer(self, entry: ZswapEntry) -> int | None:
        """Return the second obj_cgroup that a zswap entry holds; ``None`` if it holds one."""
        if not entry.beyond or entry.objcg not in self._objcgs:
            return None
        return self.payer(entry.objcg, entry.beyond_nid)

    def zswap(self, entry: ZswapEntry, nodes: Mapping[int, int]) -> list[ZswapShare]:
        """
        Split a zswap entry.

        By both rules, an entry names the obj_cgroup of the node on which its data began when it
        was stored. If the data begins on another node now, it was moved (``zs_compact()``), and
        neither rule applies.

        :param nodes: bytes of its data by node, in the order of the data
        """
        whole = [ZswapShare(entry.objcg, nid, size) for nid, size in nodes.items()]
        objcg, first = self._objcgs.get(entry.objcg), next(iter(nodes))
        if objcg is None or first == NUMA_NO_NODE:
            return whole
        has_stayed = not entry.beyond or nodes.get(entry.beyond_nid) == entry.beyond
        if objcg.nid == first and has_stayed:
            payers = {nid: self.payer(entry.objcg, nid) for nid in nodes} | {first: entry.objcg}
            shares = [ZswapShare(payers[nid], nid, size) for nid, size in nodes.items()]
            physical = {(share.payer, share.nid): share.bytes for share in shares}
            posted = {(entry.objcg, n): size for n, size in posted_zswap_nodes(nodes).items()}
            self._compare("zswap", entry.address, physical, posted)
            return shares
        shares = list(self._as_recorded(entry, nodes))
        for payer, nid, size in shares:
            known = self._objcgs.get(payer)
            if known is not None and known.nid != nid:
                self._misplaced.append(
                    Misplaced("zswap", entry.address, payer, known.nid, nid, size)
                )
        return shares or whole

    def _as_recorded(self, entry: ZswapEntry, nodes: Mapping[int, int]) -> Iterator[ZswapShare]:
        """Split a zswap entry by the payers that it records, in the order of its data."""
        paid = [[entry.objcg, entry.length - entry.beyond]]
        if entry.beyond:
            paid.append([self.payer(entry.objcg, entry.beyond_nid), entry.beyond])
        for nid, size in nodes.items():
            while size:
                part = min(size, paid[0][1])
                yield ZswapShare(paid[0][0], nid, part)
                size -= part
                paid[0][1] -= part
                if not paid[0][1]:
                    paid.pop(0)

    def _compare(self, kind: SplitKind, address: int, physical: Booked, posted: Booked) -> None:
        """
        Record a charge for which the posted and the physical rule book different bytes.

        :param address: address of the charge, for evidence
        """
        extra = Counter({k: posted.get(k, 0) - physical.get(k, 0) for k in {*physical, *posted}})
        if not any(extra.values()):
            return
        (objcg, charged), _ = extra.most_common(1)[0]
        for (payer, nid), size in extra.items():
            self._posted[kind][payer, nid] += size
            if size < 0:
                self._straddling.append(Misplaced(kind, address, objcg, charged, nid, -size))


def per_node_of(image: Image, objcgs: Mapping[int, Objcg], coverage: Coverage) -> PerNode | None:
    """
    Return a splitter of charges by node; ``None`` on kernels that do not account by node.

    :param coverage: coverage of the obj_cgroups
    """
    return PerNode(objcgs, not coverage.unreadable) if accounts_by_node(image) else None
