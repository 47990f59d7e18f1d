# SPDX-License-Identifier: LGPL-2.1-or-later
"""Percpu allocations into the ledger: by who pays, which depends on the kernel's accounting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.collect.bynode import ByNode
from memcg_inspect.linux.mm.percpu import PcpuArea, PcpuChunk, PercpuReader
from memcg_inspect.model import NUMA_NO_NODE, PercpuUsage

__all__ = ("add_percpu", "add_percpu_by_node", "percpu_usage")


#: Is shown every allocation, whoever pays, that is recorded.
Seen = Callable[[PcpuArea], None]


def add_percpu(ledger: Ledger, reader: PercpuReader, seen: Seen | None = None) -> None:
    """Add the allocations of a kernel that charges each to one obj_cgroup."""
    for chunk in reader.chunks():
        for alloc in _charged(reader, chunk, seen):
            # One charge, told by where its parts are.
            charges = 1
            for nid, size in reader.data_nodes(alloc).items():
                ledger.add(Entry(alloc.objcg, "percpu", "data", nid), size, charges)
                charges = 0
            for nid, size in reader.metadata_nodes(alloc).items():
                ledger.add(Entry(alloc.objcg, "percpu", "metadata", nid), size, 0)


def add_percpu_by_node(
    ledger: Ledger, reader: PercpuReader, by_node: ByNode, seen: Seen | None = None
) -> None:
    """Add the allocations of a kernel that charges each to the obj_cgroups of its nodes."""
    for chunk in reader.chunks():
        for alloc in _charged(reader, chunk, seen):
            data, metadata = reader.data_nodes(alloc), reader.metadata_nodes(alloc)
            posted = reader.posted_nodes(alloc)
            payers = {n: by_node.payer(alloc.objcg, n) for n in {*data, *metadata, *posted}}
            for nid in data.keys() | metadata.keys():
                if nid == NUMA_NO_NODE:
                    ledger.note_missing("percpu")
                    continue
                # An obj_cgroup is held once, whatever it pays for.
                for detail, sizes, charges in (
                    ("data", data, 1 if nid in data else 0),
                    ("metadata", metadata, 0 if nid in data else 1),
                ):
                    if sizes[nid]:
                        entry = Entry(payers[nid], "percpu", detail, nid)
                        ledger.add(entry, sizes[nid], charges)
            by_node.compare(
                "percpu",
                alloc.element,
                {(payers[nid], nid): size for nid, size in data.items()},
                {(payers[nid], nid): size for nid, size in posted.items()},
            )


def _charged(reader: PercpuReader, chunk: PcpuChunk, seen: Seen | None) -> Iterator[PcpuArea]:
    for alloc in reader.recorded(chunk):
        if seen is not None:
            seen(alloc)
        if alloc.objcg:
            yield alloc


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
