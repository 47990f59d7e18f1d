# SPDX-License-Identifier: LGPL-2.1-or-later
"""The cgroups of hugetlb of an image."""

from __future__ import annotations

from drgn import Object

from memcg_inspect.model_hugetlb import Hugetlb
from support.planting import NoVictim, Subject

__all__ = ("charged_cgroup", "cgroup_object")


def charged_cgroup(hugetlb: Hugetlb) -> int:
    """Return the cgroup with most huge pages; the root if none has any."""
    pages = {cgroup: number for (cgroup, _, _), number in hugetlb.charged.items()}
    found = max(hugetlb.cgroups, key=lambda cgroup: pages.get(cgroup, 0), default=None)
    if found is None:
        raise NoVictim("there is no cgroup of hugetlb")
    return found


def cgroup_object(subject: Subject, address: int) -> Object:
    """Return the ``struct hugetlb_cgroup *``."""
    return subject.object("struct hugetlb_cgroup *", address)
