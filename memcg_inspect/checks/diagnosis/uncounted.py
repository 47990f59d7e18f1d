# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Cause: a counter that the kernel keeps for no memcg
---------------------------------------------------

A kernel may charge a kind of memory and forget to count it. Then this counter is 0 in every memcg,
whatever is charged, and every row of it differs. Linux 6.18 does so with page tables: commit
f0c92726e89f ("ptdesc: remove references to folios from __pagetable_ctor() and pagetable_dtor()")
replaced ``lruvec_stat_add_folio()`` by ``mod_node_page_state()``, which counts for nodes only. It
was reverted in 7.0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from memcg_inspect.checks.registry import check_of
from memcg_inspect.checks.rows import RowKey, row_key
from memcg_inspect.model import counted
from memcg_inspect.report import Diagnosis, Effect, Row

__all__ = ("CAUSES", "uncounted")

#: Name and meaning, for the list in ``docs/output.md`` (Markdown).
CAUSES = {"uncounted-item": "the kernel charges memory and counts it for no memcg"}

#: The fewest memcgs with such memory: the counter of one may have been overwritten.
_FEWEST_MEMCGS = 2
#: The fewest of which nothing else is an explanation.
_FEWEST_TO_BE_SURE = 3
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "NR_PAGETABLE": ("__pagetable_ctor", "pagetable_dtor"),
    "NR_KERNEL_STACK_KB": ("account_kernel_stack",),
    "NR_VMALLOC": ("vm_area_alloc_pages", "vfree"),
    "MEMCG_VMALLOC": ("__vmalloc_area_node", "vfree"),
    "MEMCG_PERCPU_B": ("pcpu_memcg_post_alloc_hook", "pcpu_memcg_free_hook"),
}
_ANY_FUNCTIONS = ("mod_memcg_lruvec_state", "mod_memcg_state")


def uncounted(rows: Sequence[Row], by_row: Mapping[RowKey, int]) -> list[Diagnosis]:
    """
    Return a diagnosis for each counter that is 0 in all memcgs, although memory is charged.

    It is sure only if the counter was read in all memcgs, and if it is the only such counter:
    memory that is not in a dump may read as 0.

    :param rows: all rows of the report
    :param by_row: indices of findings by the row that they are about
    """
    of_item: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    sums: defaultdict[str, list[Row]] = defaultdict(list)
    unread: set[tuple[str, str]] = set()
    for row in rows:
        if row.memcg is None:
            continue
        if row.claimed is None:
            unread.add((row.identity, row.item))
        elif row.hierarchy is not None:
            if row.identity == "hierarchy":
                sums[row.item].append(row)
            elif "folded" in row.claimed and not check_of(row).counters_only:
                of_item[row.identity, row.item].append(row)
    found = {key: some for key in of_item if (some := list(_unknown(of_item[key], by_row)))}
    return [
        _diagnosis(
            some, [*some, *sums[key[1]]], by_row, is_read=key not in unread, is_only=len(found) == 1
        )
        for key, some in found.items()
    ]


def _unknown(rows: Sequence[Row], by_row: Mapping[RowKey, int]) -> Iterator[Row]:
    """Yield the rows with charges if no memcg has counted any."""
    if any(row.hierarchy or any((row.claimed or {}).values()) for row in rows):
        return
    differing = [row for row in rows if row.status == "differs" and row_key(row) in by_row]
    if len({row.memcg for row in differing}) >= _FEWEST_MEMCGS:
        yield from differing


def _diagnosis(
    unknown: Sequence[Row],
    touched: Sequence[Row],
    by_row: Mapping[RowKey, int],
    is_read: bool,
    is_only: bool,
) -> Diagnosis:
    """
    Return the diagnosis of a counter.

    :param unknown: the rows with charges
    :param touched: these, and the rows of memcgs with their descendants
    :param is_read: whether the counter of each memcg could be read
    :param is_only: whether there is no other such counter
    """
    item = unknown[0].item
    explained = {by_row[key]: row for row in touched if (key := row_key(row)) in by_row}
    amount = sum(row.off for row in unknown)
    memcgs = len({row.memcg for row in unknown})
    is_sure = is_read and is_only and memcgs >= _FEWEST_TO_BE_SURE
    return Diagnosis(
        cause="uncounted-item",
        what=f"no memcg counts {item}: {counted(-amount, unknown[0].unit)} of "
        f"{counted(memcgs, 'memcgs')} are charged, and this counter is 0 in all memcgs"
        + ("" if is_read else " that could be read"),
        confidence="only-explanation" if is_sure else "likely",
        memcgs=(),
        nid=None,
        amount=amount,
        unit=unknown[0].unit,
        evidence=(),
        evidence_total=None,
        findings=tuple(sorted(explained)),
        signature=tuple(
            Effect(
                **row_key(row)._asdict(),
                amount=row.off,
                difference=row.off,
            )
            for _, row in sorted(explained.items())
        ),
        functions=_FUNCTIONS.get(item, _ANY_FUNCTIONS),
    )
