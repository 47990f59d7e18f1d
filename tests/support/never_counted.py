# SPDX-License-Identifier: LGPL-2.1-or-later
"""A counter as a kernel leaves it that counts for no memcg, as Linux 6.18 with page tables."""

from __future__ import annotations

from collections.abc import Iterator

from drgn import Object
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from support.planting import Fault, Subject, Write

__all__ = ("arrays", "never_counted")


def arrays(subject: Subject, memcg: int) -> Iterator[tuple[Object, Object]]:
    """Yield the counters of a memcg, and of its nodes: folded, and of CPUs."""
    css = subject.object("struct mem_cgroup *", memcg)
    yield css.vmstats, css.vmstats_percpu
    for nid in subject.snapshot.image.nodes:
        yield css.nodeinfo[nid].lruvec_stats, css.nodeinfo[nid].lruvec_stats_percpu


def never_counted(subject: Subject, item: str) -> Fault:
    """Set a counter of all memcgs to what it is if nothing was ever counted."""
    slot = StatReader(subject.image, [item]).slots[item]
    writes: list[Write] = []
    for memcg in subject.snapshot.memcgs:
        for folded, of_cpus in arrays(subject, memcg):
            names = ("state", "state_local", "state_pending")
            words = [folded.member_(name)[slot] for name in names]
            for cpu in for_each_possible_cpu(subject.prog):
                part = per_cpu_ptr(of_cpus, cpu)
                words += [part.state[slot], part.state_prev[slot]]
            writes += [subject.put(word, 0) for word in words]
    return Fault(tuple(writes), (), set())
