# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``updated`` must name: flushes undone, without a list to flush them from again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.model_counters import Unfolded
from support.kernel_steps import ancestry
from support.planting import Fault, NoVictim, Planter, Subject, Write

ITEM = "unfolded counters"
#: What a flush folds for each counter.
AMOUNT = 3
#: Counters that every kernel has.
COUNTERS = (
    *("NR_INACTIVE_ANON", "NR_ACTIVE_ANON", "NR_INACTIVE_FILE", "NR_ACTIVE_FILE"),
    *("NR_ANON_MAPPED", "NR_FILE_MAPPED", "NR_FILE_PAGES", "NR_SHMEM", "NR_PAGETABLE"),
    *("WORKINGSET_REFAULT_FILE", "WORKINGSET_ACTIVATE_FILE", "MEMCG_PERCPU_B"),
)


def slots(subject: Subject, number: int) -> list[int]:
    assert number <= len(COUNTERS)
    return [StatReader(subject.image, [item]).slots[item] for item in COUNTERS[:number]]


def taken_back(subject: Subject, path: str, slot: int) -> Iterator[Write]:
    """Take what was folded of a counter out of the totals of a memcg and its ancestors."""
    for memcg in ancestry(subject, path):
        yield subject.add(memcg.vmstats.state[slot], -AMOUNT)


def victim(subject: Subject, fits: Callable[[Unfolded], bool]) -> str:
    for path in subject.victims():
        left = subject.snapshot.unfolded[subject.paths[path]]
        if not left.pending and fits(left):
            return path
    raise NoVictim("all memcgs are on lists")


def cpu_of(left: Unfolded) -> int:
    """Return a CPU that has no changes of a memcg, and does not have it on its list."""
    free = (cpu for cpu, on in left.updated.items() if not on and cpu not in left.changed)
    return next(free, -1)


def unfolded(subject: Subject, path: str, cpu: int, number: int) -> list[Write]:
    """Undo what a flush did for some counters that a CPU changed."""
    memcg, writes = subject.memcg(path), []
    local = per_cpu_ptr(memcg.vmstats_percpu, cpu)
    for slot in slots(subject, number):
        writes.append(subject.add(local.state_prev[slot], -AMOUNT))
        if subject.snapshot.features.has_local:
            writes.append(subject.add(memcg.vmstats.state_local[slot], -AMOUNT))
        writes += taken_back(subject, path, slot)
    return writes


def of_a_cpu(subject: Subject, number: int) -> Fault:
    """Change some counters of a memcg on a CPU that does not have it on its list."""
    path = victim(subject, lambda left: cpu_of(left) >= 0)
    cpu = cpu_of(subject.snapshot.unfolded[subject.paths[path]])
    writes = unfolded(subject, path, cpu, number)
    return Fault(tuple(writes), (path,), {(path, None, ITEM, number)})


def of_children(subject: Subject, number: int) -> Fault:
    """Hand counters up to a memcg that is on no list."""
    path = victim(subject, lambda left: not any(left.updated.values()) and not left.changed)
    memcg, writes = subject.memcg(path), []
    for slot in slots(subject, number):
        writes.append(subject.add(memcg.vmstats.state_pending[slot], AMOUNT))
        writes += taken_back(subject, path, slot)
    return Fault(tuple(writes), (path,), {(path, None, ITEM, number)})


PLANTERS = (
    Planter("counters of a CPU without a list", of_a_cpu, (6, 4, 12)),
    Planter("counters that children handed up", of_children, (1, 5, 12)),
)
