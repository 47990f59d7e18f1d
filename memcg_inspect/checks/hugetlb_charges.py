# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rows of cgroups that are charged for huge pages
-----------------------------------------------

``alloc_hugetlb_folio()`` charges the page counter of the cgroup and of those above it, then takes a
huge page, and records the cgroup in it and its pages in the usage of the node.
``free_huge_folio()`` does the reverse. Pages and usages of nodes change under ``hugetlb_lock``;
page counters change without it. So a page counter may be off by a huge page for each task that is
in one of these functions, and the usage of a node only while the lock is held.
"""

from __future__ import annotations

from collections.abc import Mapping

from memcg_inspect.checks.check import Explained
from memcg_inspect.checks.half_done import pattern
from memcg_inspect.checks.rows import Missing, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running
from memcg_inspect.model_hugetlb import Hugetlb
from memcg_inspect.report import Row

__all__ = (
    "half_done",
    "item_of",
    "parent_item",
    "why_not_kept",
    "why_pages_missing",
)

#: Functions that charge or uncharge a huge page, or move its charge: up to 6.2 ``alloc_huge_page``
#: and ``free_huge_page``.
_CHARGES = pattern(
    r"alloc_huge(tlb_folio|_page)|free_huge_(folio|page)|hugetlb_cgroup_|move_hugetlb_state"
)
#: The least number of frames of a stack that could be unwound.
_UNWOUND = 3


def item_of(hugetlb: Hugetlb, n: int, file: str, cgroup: int) -> str:
    """
    Return the name of a row.

    :param n: index of the size of huge pages
    :param file: name of the counter, e.g. ``usage``
    :param cgroup: ``struct hugetlb_cgroup *``
    """
    return f"hugetlb.{hugetlb.sizes[n].name}.{file}[{_cgroup_name(hugetlb, cgroup)}]"


def _cgroup_name(hugetlb: Hugetlb, cgroup: int) -> str:
    known = hugetlb.cgroups.get(cgroup)
    # Cgroups that were removed share paths.
    return known.path if known is not None and known.is_online else f"{cgroup:#x}"


def parent_item(hugetlb: Hugetlb, item: str) -> str | None:
    """
    Return the name of the row of the parent of a cgroup.

    :return: ``None`` for the root, and for what is no cgroup
    """
    kind, _, name = item.removesuffix("]").partition("[")
    for cgroup in hugetlb.cgroups.values():
        if name == _cgroup_name(hugetlb, cgroup.address) and cgroup.parent is not None:
            return f"{kind}[{_cgroup_name(hugetlb, cgroup.parent)}]"
    return None


def why_pages_missing(snapshot: Snapshot) -> Missing | None:
    """Return why huge pages may be missing, or may be charged to cgroups that were not read."""
    if not snapshot.complete("pages"):
        return missing_if("struct pages are not in the image")
    if not snapshot.complete("hugetlb"):
        return missing_if("the cgroups of hugetlb are not all in the image", either_way=True)
    return None


def why_not_kept(snapshot: Snapshot) -> str | None:
    """Return why a kernel does not charge cgroups for huge pages."""
    if snapshot.hugetlb.not_kept is None and not snapshot.hugetlb.sizes:
        return "no sizes of huge pages of hugetlb were found on this machine"
    return snapshot.hugetlb.not_kept


def _charging(snapshot: Snapshot) -> list[Running]:
    """Return the tasks that may be charging, or uncharging, a huge page."""
    return [
        cpu
        for cpu in snapshot.running
        if cpu.busy and (any(map(_CHARGES.match, cpu.functions)) or len(cpu.functions) < _UNWOUND)
    ]


def half_done(snapshot: Snapshot, row: Row, off: Mapping[int, int]) -> Explained | None:
    """
    Return why a row that differs is no finding; ``None`` if it is one.

    All rows of its size must not be off by more than a huge page for each task that is charging
    one.

    :param off: pages that all rows are off by, by index of the size
    """
    n = _size_of(snapshot.hugetlb, row)
    tasks = _charging(snapshot)
    if not tasks or n is None:
        return None
    pages = snapshot.hugetlb.sizes[n].pages
    if row.off % pages or off[n] > len(tasks) * pages:
        return None
    where = ", ".join(f"{task.comm} ({task.pid})" for task in tasks)
    reason = f"a huge page may be half charged by {where}"
    is_known = all(any(map(_CHARGES.match, task.functions)) for task in tasks)
    return Explained("in-flight" if is_known else "unverifiable", reason)


def _size_of(hugetlb: Hugetlb, row: Row) -> int | None:
    name = row.item.removeprefix("hugetlb.").partition(".")[0]
    return next((n for n, size in enumerate(hugetlb.sizes) if size.name == name), None)
