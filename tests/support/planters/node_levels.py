# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``node_levels`` must name."""

from __future__ import annotations

from drgn.helpers.linux.mmzone import NODE_DATA

from support.planting import Fault, Planter, Subject

ANON, FILE, SECONDARY = "NR_ANON_MAPPED", "NR_FILE_PAGES", "NR_SECONDARY_PAGETABLE"


def vm_stat(subject: Subject, size: int) -> Fault:
    """Change the counter of the last node."""
    nid, prog = subject.snapshot.image.nodes[-1], subject.prog
    counter = NODE_DATA(prog, nid).vm_stat[prog[ANON]]
    return Fault((subject.add(counter, size),), (), {("?", nid, ANON, size)})


def file_pages(subject: Subject, size: int) -> Fault:
    """Change the counter whose row is the sum of all nodes."""
    nid, prog = subject.snapshot.image.nodes[0], subject.prog
    counter = NODE_DATA(prog, nid).vm_stat[prog[FILE]]
    return Fault((subject.add(counter, size),), (), {("?", None, FILE, size)})


def memcg_and_its_node(subject: Subject, size: int) -> Fault:
    """Change both counters of a memcg alike, of pages that the node does not have."""
    path, nid = subject.largest("kmem", "table")
    writes = tuple(
        subject.add(subject.percpu_counter(path, SECONDARY, where), size) for where in (None, nid)
    )
    return Fault(writes, (path,), {("?", nid, SECONDARY, -size)})


PLANTERS = (
    Planter("the counter of a node", vm_stat, (-2, 1, 4_000)),
    Planter("NR_FILE_PAGES of a node", file_pages, (1, 4_000)),
    Planter("both levels of a memcg", memcg_and_its_node, (1, 4_000)),
)
