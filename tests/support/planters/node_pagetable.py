# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``node_pagetable`` must name."""

from __future__ import annotations

from drgn.helpers.linux.mmzone import NODE_DATA

from support.planting import Fault, Planter, Subject

ITEM = "NR_PAGETABLE"


def vm_stat(subject: Subject, size: int) -> Fault:
    """Change the counter of the last node."""
    nid, prog = subject.snapshot.image.nodes[-1], subject.prog
    counter = NODE_DATA(prog, nid).vm_stat[prog[ITEM]]
    return Fault((subject.add(counter, size),), (), {("?", nid, ITEM, size)})


PLANTERS = (Planter("the counter of a node", vm_stat, (1, -2, 4_000)),)
