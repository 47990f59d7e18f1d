# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Vmalloc areas that are being freed
----------------------------------

``vfree()`` takes an area off the list of all areas first, and then takes its pages out of the
counters one by one. Large areas have thousands of pages. A task that is in ``vfree()`` has the
``struct vm_struct`` on its stack. So the pages of that area which the counters may still have are
known, and its registers or its stack tell which page it has come to.

Up to 7.0, ``__vmalloc_area_node()`` adds the pages of a new area to ``MEMCG_VMALLOC`` in the same
way, when the area is on the list already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcg_inspect.checks.check import Explained
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import PagesOfArea, PartialArea, Running, counted
from memcg_inspect.report import Row

__all__ = ("explain_areas", "explain_areas_of_subtree", "most_of_areas")

_FREES = re.compile(r"_*(vfree|vunmap|vm_area_free_pages|kvfree|free_work|delayed_vfree_work)")
_COUNTS = re.compile(r"_*(vmalloc|kvmalloc|kvzalloc)")
#: Counter of all nodes, which changes by a whole area.
_TOTAL = "nr_vmalloc_pages"
_ITEMS = ("NR_VMALLOC", "MEMCG_VMALLOC")
#: More sums of what several areas may have left explain nothing: any amount may be among them.
_MOST_SUMS = 4096


class _Amounts(NamedTuple):
    """What one area may add to a row: claimed less found, in pages."""

    cpu: Running
    area: PartialArea
    amounts: Sequence[int]


def explain_areas(snapshot: Snapshot, row: Row) -> Explained | None:
    """Return that a row is in flight if what areas have left is what it is off by."""
    return _explain(snapshot, row, False)


def explain_areas_of_subtree(snapshot: Snapshot, row: Row) -> Explained | None:
    """Return the same for a row of a memcg with its descendants."""
    return _explain(snapshot, row, True)


def most_of_areas(snapshot: Snapshot, cpu: Running, row: Row, of_subtree: bool) -> int:
    """Return the most pages by which areas of one task may change a row."""
    found = _of_task(snapshot, cpu, row, of_subtree)
    return sum(max(map(abs, some.amounts)) for some in found)


def _explain(snapshot: Snapshot, row: Row, of_subtree: bool) -> Explained | None:
    found = [some for cpu in snapshot.running for some in _of_task(snapshot, cpu, row, of_subtree)]
    # By amount, what each area adds to it.
    sums: dict[int, tuple[int, ...]] = {0: ()} if found else {}
    for some in found:
        sums = {
            total + amount: (*parts, amount)
            for total, parts in sums.items()
            for amount in some.amounts
        }
        if len(sums) > _MOST_SUMS:
            return None
    parts = sums.get(row.off)
    if parts is None:
        return None
    reasons = [_reason(some, part) for some, part in zip(found, parts, strict=True) if part]
    return Explained("in-flight", "; ".join(reasons))


def _of_task(snapshot: Snapshot, cpu: Running, row: Row, of_subtree: bool) -> Iterator[_Amounts]:
    for area in cpu.areas:
        functions = _COUNTS if area.is_linked else _FREES
        if not area.is_counted or not any(map(functions.match, cpu.functions)):
            continue
        amounts = _amounts(snapshot, area, row, of_subtree)
        if any(amounts):
            yield _Amounts(cpu, area, amounts)


def _amounts(snapshot: Snapshot, area: PartialArea, row: Row, of_subtree: bool) -> Sequence[int]:
    """Return what an area may add to a row; with 0 if it may add nothing."""
    sign = -1 if area.is_linked else 1
    if row.item == _TOTAL:
        return (0, sign * area.nr_pages)
    found, index = [], area.nr_pages - sum(run.pages for run in area.left)
    runs = []
    for run in area.left:
        if _is_of(snapshot, run, row, of_subtree):
            runs.append(range(index, index + run.pages))
        index += run.pages
    for stop in area.stops:
        found.append(sign * sum(max(0, run.stop - max(run.start, stop)) for run in runs))
    return tuple(dict.fromkeys([0, *found]))


def _is_of(snapshot: Snapshot, run: PagesOfArea, row: Row, of_subtree: bool) -> bool:
    """Return whether the counter of a row has some pages."""
    if row.item not in _ITEMS:
        return False
    if row.nid not in (None, run.nid):
        return False
    if row.memcg is None:
        return True
    payer = snapshot.payer(run.payer) if run.payer else None
    return row.memcg in snapshot.ancestors(payer) if of_subtree else row.memcg == payer


def _reason(some: _Amounts, pages: int) -> str:
    cpu, area = some.cpu, some.area
    where = f"{cpu.comm} ({cpu.pid})" if cpu.waiting else f"CPU {cpu.cpu} ({cpu.comm}, {cpu.pid})"
    number = counted(abs(pages), "pages")
    if area.is_linked:
        return f"{where} has not counted {number} of the vmalloc area {area.address:#x} yet"
    return f"{where} frees the vmalloc area {area.address:#x}, and {number} of it are still counted"
