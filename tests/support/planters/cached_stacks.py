# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``cached_stacks`` must name."""

from __future__ import annotations

from collections import Counter

from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.linux.mm.memcg_data import kernel_payers
from support.planting import Fault, NoVictim, Planter, Subject


def charged(subject: Subject, _: int) -> Fault:
    """Let a CPU keep a stack that is charged: that of a task."""
    kept = per_cpu_ptr(subject.prog["cached_stacks"].address_of_(), 0)[0][0]
    for task in subject.snapshot.tasks:
        area = subject.object("struct task_struct *", task.address).stack_vm_area.read_()
        pages = [area.pages[i].value_() for i in range(int(area.nr_pages))]
        payers = kernel_payers(subject.image, pages).values()
        nodes = Counter(nid for objcg, nid in payers if objcg)
        if nodes:
            return Fault(
                (subject.put(kept, area.value_()),),
                (),
                {("?", nid, "cached_stacks", count) for nid, count in nodes.items()},
            )
    raise NoVictim("no stack is charged")


PLANTERS = (Planter("a charged stack in the cache of a CPU", charged),)
