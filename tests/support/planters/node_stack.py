# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``node_stack`` must name."""

from __future__ import annotations

from drgn.helpers.linux.mmzone import NODE_DATA

from support.planting import Fault, NoVictim, Planter, Subject

ITEM = "NR_KERNEL_STACK_KB"


def vm_stat(subject: Subject, size: int) -> Fault:
    """Change the counter of the last node on which all stacks belong to tasks, or are kept."""
    # A stack that RCU is about to free may be counted or not.
    pages, prog = subject.snapshot.node_pages, subject.prog
    known = [n for n in subject.snapshot.image.nodes if not pages.get(("unknown stack", n))]
    if not known:
        raise NoVictim("each node has stacks of no task")
    nid = known[-1]
    counter = NODE_DATA(prog, nid).vm_stat[prog[ITEM]]
    return Fault((subject.add(counter, size),), (), {("?", nid, ITEM, size)})


PLANTERS = (Planter("the counter of a node", vm_stat, (16, 1, -4, 4_000)),)
