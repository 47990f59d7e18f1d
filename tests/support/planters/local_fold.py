# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``local_fold`` must name."""

from __future__ import annotations

from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from support.planting import Fault, Planter, Subject


def of_a_node(subject: Subject, size: int) -> Fault:
    """Change the local counter of slab memory of a memcg and a node."""
    path, nid = subject.largest("slab", "reclaimable")
    item = "NR_SLAB_RECLAIMABLE_B"
    slot = StatReader(subject.image, [item]).slots[item]
    counter = subject.memcg(path).nodeinfo[nid].lruvec_stats.state_local[slot]
    return Fault((subject.add(counter, size),), (path,), {(path, nid, item, size)})


def of_a_memcg(subject: Subject, size: int) -> Fault:
    """Change the local counter of a memcg whose item no other identity compares."""
    path, item = subject.victims()[0], "WORKINGSET_ACTIVATE_FILE"
    slot = StatReader(subject.image, [item]).slots[item]
    counter = subject.memcg(path).vmstats.state_local[slot]
    return Fault((subject.add(counter, size),), (path,), {(path, None, item, size)})


PLANTERS = (
    Planter("the local counter of a node", of_a_node, (1, -1, 4_000)),
    Planter("the local counter of a memcg", of_a_memcg, (-1, 1, 4_000)),
)
