# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of nodes
-----------------

Mirrors ``node_page_state()`` and ``mod_node_page_state()`` of :linux:`mm/vmstat.c`. A counter is
``pglist_data.vm_stat``, and the changes in ``struct per_cpu_nodestat`` that CPUs have not added
to it yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from drgn import FaultError, offsetof
from drgn.helpers.linux.mmzone import for_each_online_pgdat

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Coverage, NodeStat

__all__ = ("read_node_stats",)


def read_node_stats(
    image: Image, items: Iterable[str], coverage: Coverage
) -> dict[tuple[int, str], NodeStat]:
    """
    Read counters of all online nodes.

    :param items: enumerators of ``enum node_stat_item``; those that the kernel does not define are
        left out
    :param coverage: counts the nodes that were read, and those that are unreadable
    :return: by node and enumerator, in pages. (Nodes count items whose names end in ``_B`` in
        pages, too: ``mod_node_page_state()`` converts them.)
    """
    slots = {name: slot for name in items if (slot := constant(image, name)) is not None}
    memory, stats = image.memory, {}
    diffs = offsetof(image.type("struct per_cpu_nodestat"), "vm_node_stat_diff")
    for pgdat in for_each_online_pgdat(image.prog):
        try:
            percpu = pgdat.per_cpu_nodestats.value_() + diffs
            for name, slot in slots.items():
                pending = 0
                for offset in percpu_offsets(image).values():
                    diff = memory.read(percpu + offset + slot, 1)  # s8
                    pending += int.from_bytes(diff, "little", signed=True)
                folded = int(pgdat.vm_stat[slot].counter)
                stats[int(pgdat.node_id), name] = NodeStat(folded, pending)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("counters of a node", error.address, str(error))
    return stats
