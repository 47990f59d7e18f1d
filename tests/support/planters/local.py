# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``local`` must name: what CPUs folded, and the local counter, but not the total."""

from __future__ import annotations

from drgn import Object
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from support.planting import Fault, NoVictim, Planter, Subject, Write


def move(subject: Subject, stats: Object, percpu: Object, item: str, size: int) -> list[Write]:
    """Fold *size* more into a local counter, as if the total had not taken part."""
    slot = StatReader(subject.image, [item]).slots[item]
    local = per_cpu_ptr(percpu, 0)
    things = (stats.state_local[slot], local.state[slot], local.state_prev[slot])
    return [subject.add(thing, size) for thing in things]


def pages_of_a_node(subject: Subject, size: int) -> Fault:
    """Change the local number of pages on the LRU lists of a memcg and a node."""
    path, nid = subject.largest("lru")
    item, pn = "NR_INACTIVE_FILE", subject.memcg(path).nodeinfo[nid]
    writes = move(subject, pn.lruvec_stats, pn.lruvec_stats_percpu, item, size)
    return Fault(tuple(writes), (path,), {(path, nid, item, size)})


def slab_of_a_node(subject: Subject, size: int) -> Fault:
    """Change the local slab memory of a memcg and a node."""
    path, nid = subject.largest("slab", "reclaimable")
    item, pn = "NR_SLAB_RECLAIMABLE_B", subject.memcg(path).nodeinfo[nid]
    if item not in subject.snapshot.features.local.of_nodes:
        raise NoVictim(f"this kernel does not reparent {item}")
    writes = move(subject, pn.lruvec_stats, pn.lruvec_stats_percpu, item, size)
    return Fault(tuple(writes), (path,), {(path, nid, item, size)})


def pages_of_a_memcg(subject: Subject, size: int) -> Fault:
    """Change the local number of pages on the LRU lists of a memcg, not of its nodes."""
    path, _ = subject.largest("lru")
    item, memcg = "NR_ACTIVE_FILE", subject.memcg(path)
    writes = move(subject, memcg.vmstats, memcg.vmstats_percpu, item, size)
    return Fault(tuple(writes), (path,), {(path, None, item, size)})


PLANTERS = (
    Planter("the local pages of a node", pages_of_a_node, (1, -1, 4_000)),
    # Some too much may be left of removed memcgs: the kernel promises only that it is not too low.
    Planter("the local slab memory of a node", slab_of_a_node, (-8, -4_000, 1 << 40)),
    Planter("the local pages of a memcg", pages_of_a_memcg, (4_000, 1, -1)),
)
