# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-node counters
-----------------

Mirrors ``lib/nodecounter.c`` of the patch that counts the pages of processes by node, on top of
:linux:`lib/`. No released kernel has it. A CPU adds to the part of its node until the part reaches
``NODECOUNTER_BATCH``. Then it moves the part to ``count``.
"""

from __future__ import annotations

from collections.abc import Iterable

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import constant, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mmzone import online_nodes, possible_nodes
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets

__all__ = ("nodecounter_bound", "nodecounter_parts")

#: ``sizeof(atomic_t)``: the part of a node; ``sizeof(int)``.
PART = 4


def nodecounter_bound(image: Image) -> int | None:
    """
    Return how much ``count`` can differ from the sum: less than a batch for each node with CPUs.

    :return: the bound; ``None`` if the batch is not known
    """
    batch = constant(image, "NODECOUNTER_BATCH")
    return None if batch is None else (batch - 1) * len(_nodes_with_cpus(image))


@per_image
def _nodes_with_cpus(image: Image) -> frozenset[int]:
    # A node keeps its part when its last CPU goes offline.
    try:
        at = image.object("numa_node").address_ or 0
        offsets = percpu_offsets(image).values()
        return frozenset(
            int.from_bytes(image.memory.read(at + offset, PART), image.memory.order)
            for offset in offsets
        )
    except (UnknownKernelError, FaultError):
        # Without CONFIG_USE_PERCPU_NUMA_NODE_ID, or not in the image: at most these.
        return frozenset(online_nodes(image))


def nodecounter_parts(image: Image, counters: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """
    Read the parts of counters that are made together.

    :param counters: for each group, the ``struct nodecounter_node *`` of its counters, and the
        number of counters
    :return: sums of the parts of each counter, by ``struct nodecounter_node *``, without groups
        that cannot be read
    """
    node = image.type("struct nodecounter_node")
    size, first = sizeof(node), offsetof(node, "parts")
    most = sizeof(member_type(node, "parts")) // PART
    memory, sums = image.memory, {}
    for at, count in counters:
        try:
            data = memory.read(at, size * len(possible_nodes(image)))
        except FaultError:
            continue
        sums[at] = [
            sum(
                int.from_bytes(data[start : start + PART], memory.order, signed=True)
                for start in range(first + index * PART, len(data), size)
            )
            for index in range(min(count, most))
        ]
    return sums
