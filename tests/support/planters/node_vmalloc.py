# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``node_vmalloc`` must name."""

from __future__ import annotations

from drgn.helpers.linux.mmzone import NODE_DATA

from memcg_inspect.linux.mm.vmalloc import nr_vmalloc_pages
from support.planting import Fault, Planter, Subject

BY_NODE, TOTAL = "NR_VMALLOC", "nr_vmalloc_pages"


def counter(subject: Subject, size: int) -> Fault:
    """Change the counter of the last node, or that of all nodes before 7.1."""
    nid, prog = subject.snapshot.image.nodes[-1], subject.prog
    if nr_vmalloc_pages(subject.image) is not None:
        write = subject.add(subject.image.object(TOTAL), size)
        return Fault((write,), (), {("?", None, TOTAL, size)})
    write = subject.add(NODE_DATA(prog, nid).vm_stat[prog[BY_NODE]], size)
    return Fault((write,), (), {("?", nid, BY_NODE, size)})


PLANTERS = (Planter("the counter of a node, or of all", counter, (1, -3, 4_000)),)
