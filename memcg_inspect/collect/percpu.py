# SPDX-License-Identifier: LGPL-2.1-or-later
"""Add percpu allocations to the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from memcg_inspect.checks.ledger import Amount, Entry, Ledger
from memcg_inspect.collect.pernode import PerNode
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.model import NUMA_NO_NODE, PercpuUsage

__all__ = ("add_percpu", "percpu_usage")

#: Called for every allocation that has an obj_cgroup or a codetag.
OnArea = Callable[[PcpuArea], None]


def add_percpu(
    ledger: Ledger, reader: PercpuReader, per_node: PerNode | None, on_area: OnArea | None = None
) -> None:
    """
    Add all charged percpu allocations.

    :param per_node: splits a charge by node; ``None`` on kernels that charge one obj_cgroup for all
        nodes
    :param on_area: called for each allocation that has an obj_cgroup or a codetag
    """
    for chunk in reader.chunks():
        for area in reader.recorded(chunk):
            if on_area is not None:
                on_area(area)
            if not area.objcg:
                continue
            split = _split(reader, area) if per_node is None else per_node.percpu(reader, area)
            for entry, amount in split:
                if per_node is not None and entry.nid == NUMA_NO_NODE:
                    ledger.note_missing("percpu")  # the payer depends on the node
                else:
                    ledger.add(entry, amount.bytes, amount.charges)
    if reader.coverage.unreadable:
        ledger.note_missing("percpu")


def _split(reader: PercpuReader, area: PcpuArea) -> Iterator[tuple[Entry, Amount]]:
    """Split a charge to one obj_cgroup by backing node. The parts count as one charge."""
    charges = 1
    for nid, size in reader.data_nodes(area).items():
        yield Entry(area.objcg, "percpu", "data", nid), Amount(size, charges)
        charges = 0
    for nid, size in reader.metadata_nodes(area).items():
        yield Entry(area.objcg, "percpu", "metadata", nid), Amount(size, 0)


def percpu_usage(ledger: Ledger, reader: PercpuReader) -> tuple[PercpuUsage, ...]:
    """
    Return the memory of percpu chunks by node, and how much of it memcgs pay for.

    :param ledger: ledger that has all percpu allocations
    :param reader: reader that has read all chunks
    """
    charged: Counter[int] = Counter()
    for entry, amount in ledger:
        if entry.kind == "percpu" and entry.detail == "data":
            charged[entry.nid] += amount.bytes
    return tuple(
        PercpuUsage(nid, reader.pages[nid], reader.allocated[nid], charged[nid])
        for nid in sorted(reader.pages | charged)
    )
