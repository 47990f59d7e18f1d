# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of nodes
-----------------

Mirrors ``vm_stat`` of ``struct pglist_data`` and ``struct per_cpu_nodestat`` in
:linux:`include/linux/mmzone.h`.
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

    :param items: enumerators of ``enum node_stat_item``
    :return: by node and item, in pages also where the item is named after bytes
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
                    (byte,) = memory.read(percpu + offset + slot, 1)  # s8
                    pending += byte - 256 if byte > 127 else byte
                folded = int(pgdat.vm_stat[slot].counter)
                stats[int(pgdat.node_id), name] = NodeStat(folded, pending)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("counters of a node", error.address, str(error))
    return stats
