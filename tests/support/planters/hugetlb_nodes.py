# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``hugetlb_nodes`` must name."""

from __future__ import annotations

from memcg_inspect.checks.hugetlb_charges import item_of
from support.hugetlb import cgroup_object, charged_cgroup
from support.planting import Fault, Planter, Subject


def usage(subject: Subject, size: int) -> Fault:
    """Change the usage of a node."""
    hugetlb = subject.snapshot.hugetlb
    cgroup, nid = charged_cgroup(hugetlb), hugetlb.nids[-1]
    word = cgroup_object(subject, cgroup).nodeinfo[nid].usage[0]
    item = item_of(hugetlb, 0, "numa_stat", cgroup)
    return Fault((subject.add(word, size),), (), {("?", nid, item, size)})


PLANTERS = (Planter("the usage of a node", usage, (512, -512, 1)),)
