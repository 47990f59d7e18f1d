# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Findings that a fault of a released kernel explains to the byte (docs/kernels.md).

Guests of these kernels are healthy but for that. Any other finding on them is a false one, so what
a fault explains is computed from what the kernel does, and not from what the audit says of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.report import Finding, Report

#: Series in which ``refill_obj_stock()`` counts wrong if the object stock is in use.
STOCK_IN_USE = ("6.16", "6.17", "6.18")
#: Series in which no memcg counts page tables.
NO_PAGETABLES = ("6.18",)


def charges_of(image: Image) -> dict[str, set[int]]:
    """Return the bytes that objects of caches with charged objects are charged with, by item."""
    reader, found = SlabReader(image), defaultdict[str, set[int]](set)
    for piece in scan_pages(image):
        for slab in filter(None, map(reader.slab, piece.slabs)):
            if slab.vector is not None:
                item = ITEMS["reclaimable" if slab.cache.reclaimable else "unreclaimable"]
                found[item].add(slab.cache.charge)
    return found


def explained(kernel: str, report: Report, charges: Mapping[str, Collection[int]]) -> list[Finding]:
    """
    Return the findings that faults of a kernel explain.

    :param kernel: name of the kernel in the lab
    :param charges: bytes that one object can be charged with, by item
    """
    own = [f for f in report.findings if f.identity in ("slab", "pagetable")]
    wrong = {n for n, f in enumerate(own) if _is_of_fault(kernel, report, f, charges)}
    others = {(f.item, f.nid) for n, f in enumerate(own) if n not in wrong}
    # The counter of a memcg with descendants is off by what theirs are off by together.
    known = {(f.item, f.nid) for f in own} - others
    sums = [f for f in report.findings if f.identity == "hierarchy" and (f.item, f.nid) in known]
    return [*(own[n] for n in sorted(wrong)), *sums]


def _is_of_fault(
    kernel: str, report: Report, finding: Finding, charges: Mapping[str, Collection[int]]
) -> bool:
    """Return whether the own counter of a memcg differs by what a fault makes."""
    if finding.identity == "slab" and kernel in STOCK_IN_USE:
        page = report.image.page_size
        return finding.difference in of_one_object(charges.get(finding.item, ()), page)
    if finding.identity == "pagetable" and kernel in NO_PAGETABLES:
        rows = [row for row in report.rows if row.item == finding.item and row.memcg is not None]
        return not any(row.hierarchy or sum((row.claimed or {}).values()) for row in rows)
    return False


def of_one_object(charges: Collection[int], page: int) -> Iterator[int]:
    """
    Yield what ``refill_obj_stock()`` leaves for one object if it cannot lock the stock.

    It counts the bytes that it is given to keep: of an object that is freed, its size, where it is
    to subtract that; of one that is allocated, what is left of the last page.
    """
    for size in charges:
        yield size - -size
        yield -size % page - size
