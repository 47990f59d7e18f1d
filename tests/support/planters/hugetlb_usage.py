# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``hugetlb_usage`` must name."""

from __future__ import annotations

from memcg_inspect.checks.hugetlb_charges import item_of, parent_item
from support.hugetlb import cgroup_object, charged_cgroup
from support.planting import Fault, Planter, Subject


def page_counter(subject: Subject, size: int) -> Fault:
    """Change the page counter of one cgroup."""
    hugetlb = subject.snapshot.hugetlb
    cgroup = charged_cgroup(hugetlb)
    item = item_of(hugetlb, 0, "usage", cgroup)
    named = {("?", None, item, size)}
    above = parent_item(hugetlb, item)
    if above is not None:
        # The parent's own share is its counter less this one.
        named.add(("?", None, above, -size))
    counter = cgroup_object(subject, cgroup).hugepage[0].usage
    return Fault((subject.add(counter, size),), (), named)


PLANTERS = (Planter("a page counter", page_counter, (512, -512, 1)),)
