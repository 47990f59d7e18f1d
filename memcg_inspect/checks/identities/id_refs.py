# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``id_refs``
--------------------

For each memcg: ``id.ref`` is the number of swap entries that record the ID of the memcg, and one
more while the memcg is online. See ``mem_cgroup_private_id_get_online()``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check, in_flight, references_differ
from memcg_inspect.checks.held_on_stack import doubt_of, held_on_stack
from memcg_inspect.checks.page_counters import most_swapped, why_swap_missing
from memcg_inspect.checks.rows import RowKey, doubted, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import StackRef
from memcg_inspect.report import Row

__all__ = ("CHECK", "id_ref_rows")


def id_ref_rows(snapshot: Snapshot) -> list[Row]:
    """Compare ``id.ref`` of each memcg with the swap entries that record its ID."""
    missing, rows = why_swap_missing(snapshot), []
    for memcg in snapshot.memcgs.values():
        if memcg.parent is None:
            continue
        key = RowKey("id_refs", "id.ref", "references", memcg.address)
        css = snapshot.css.get(memcg.address)
        if css is None:
            rows.append(make_row(key, {}, None))
            continue
        found = {
            "memcg": int(css.is_online),
            # The ID of a memcg that was removed is 0 when nothing refers to it any more.
            "swap": snapshot.swap_ids.get(css.id, 0) if css.id else 0,
        }
        row = make_row(key, found, {"id.ref": css.id_refs}, missing)
        rows.append(doubted(row, doubt_of(snapshot, row, _most)))
    return rows


def _most(task: StackRef) -> int:
    """Return the most references that a task has taken for entries that do not record the ID."""
    # mem_cgroup_try_charge_swap() takes them for all pages of a folio before it records the ID.
    return max(most_swapped(task), 1)


def _sentence(row: Row) -> str:
    return references_differ(
        row,
        row.item,
        "the memcg and its ID are never freed",
        "the ID is freed while it is used",
    )


CHECK = Check(
    name="id_refs",
    counter="`id.ref` of each memcg except the root",
    unit="references",
    found="swap entries that record the ID of the memcg, and the memcg itself while it is online",
    sources=("memcg", "swap"),
    places=("id.ref",),
    rows=id_ref_rows,
    explain=lambda snapshot, row: in_flight(held_on_stack(snapshot, row, _most)),
    above="unknown-references",
    below="missing-references",
    sentence=_sentence,
)
