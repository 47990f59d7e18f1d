# SPDX-License-Identifier: LGPL-2.1-or-later
"""Percpu allocations into the ledger: by who pays, which depends on the kernel's accounting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from memcg_inspect.audit.ledger import Entry, Ledger
from memcg_inspect.linux.percpu import PercpuReader
from memcg_inspect.model import NUMA_NO_NODE, Objcg, PercpuUsage

__all__ = ("add_percpu", "add_percpu_by_node", "percpu_usage")


def add_percpu(ledger: Ledger, reader: PercpuReader) -> None:
    """Add the allocations of a kernel that charges each to one obj_cgroup."""
    for chunk in reader.chunks():
        for alloc in reader.charged(chunk):
            # One charge, told by where its parts are.
            charges = 1
            for nid, size in reader.data_nodes(alloc).items():
                ledger.add(Entry(alloc.objcg, "percpu", "data", nid), size, charges)
                charges = 0
            for nid, size in reader.metadata_nodes(alloc).items():
                ledger.add(Entry(alloc.objcg, "percpu", "metadata", nid), size, 0)


def add_percpu_by_node(
    ledger: Ledger, reader: PercpuReader, objcgs: Mapping[int, Objcg], is_whole: bool
) -> dict[tuple[int, int], int]:
    """
    Add the allocations of a kernel that charges each to the obj_cgroups of its nodes.

    :param is_whole: whether all obj_cgroups were read; else some parts have no known payer
    :return: bytes that the posted rule would book beyond those that are there, by obj_cgroup
        and node
    """
    posted: Counter[tuple[int, int]] = Counter()
    payers = _Payers(objcgs, is_whole)
    for chunk in reader.chunks():
        for alloc in reader.charged(chunk):
            data, metadata = reader.data_nodes(alloc), reader.metadata_nodes(alloc)
            for nid in data.keys() | metadata.keys():
                if nid == NUMA_NO_NODE:
                    ledger.gap("percpu")
                    continue
                payer = payers.of(alloc.objcg, nid)
                # An obj_cgroup is held once, whatever it pays for.
                for detail, sizes, charges in (
                    ("data", data, 1 if nid in data else 0),
                    ("metadata", metadata, 0 if nid in data else 1),
                ):
                    if sizes[nid]:
                        entry = Entry(payer, "percpu", detail, nid)
                        ledger.add(entry, sizes[nid], charges)
            for nid, size in reader.posted_nodes(alloc).items():
                posted[payers.of(alloc.objcg, nid), nid] += size
            for nid, size in data.items():
                posted[payers.of(alloc.objcg, nid), nid] -= size
    return {key: size for key, size in posted.items() if size}


def percpu_usage(ledger: Ledger, reader: PercpuReader) -> tuple[PercpuUsage, ...]:
    """
    Return the memory of percpu chunks by node, and how much of it memcgs pay for.

    :param ledger: that the allocations have been added to
    :param reader: that has walked the chunks
    """
    charged: Counter[int] = Counter()
    for entry, amount in ledger:
        if entry.kind == "percpu" and entry.detail == "data":
            charged[entry.nid] += amount.bytes
    return tuple(
        PercpuUsage(nid, reader.pages[nid], reader.allocated[nid], charged[nid])
        for nid in sorted(reader.pages | charged)
    )


class _Payers:
    """Finds the obj_cgroup of another node that pays for a part of an allocation."""

    def __init__(self, objcgs: Mapping[int, Objcg], is_whole: bool) -> None:
        self._objcgs = objcgs
        self._is_whole = is_whole
        # Without siblings, a part is paid for by the obj_cgroup in use now.
        self._current = {(o.memcg, o.nid): o.address for o in objcgs.values() if o.memcg_refs}

    def of(self, objcg: int, nid: int) -> int:
        known = self._objcgs.get(objcg)
        if known is None:
            return objcg
        if 0 <= nid < len(known.siblings) and known.siblings[nid]:
            return known.siblings[nid]
        return self._current.get((known.memcg, nid), objcg if self._is_whole else 0)
