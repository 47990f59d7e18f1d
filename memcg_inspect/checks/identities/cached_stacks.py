# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``cached_stacks``
--------------------------

For each node: no page of the kernel stacks that CPUs keep for new tasks is charged. A page that is
charged in the cache is charged again with the next task, and never uncharged.
"""

from __future__ import annotations

from dataclasses import replace

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "cached_stack_rows")


def cached_stack_rows(snapshot: Snapshot) -> list[Row]:
    """Count the pages of cached stacks that are not charged, by node."""
    rows = []
    for nid in snapshot.image.nodes:
        pages = [page for page in snapshot.cached_stacks or () if page.nid == nid]
        row = make_row(
            RowKey("cached_stacks", "cached_stacks", "pages", nid=nid),
            {"uncharged": sum(not page.objcg for page in pages)},
            {"cached": len(pages)},
        )
        if row.status == "exact" and not snapshot.complete("cached_stacks"):
            row = replace(row, status="unverifiable", reason="cached stacks are not in the image")
        rows.append(row)
    return rows


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    charged = [p for p in snapshot.cached_stacks or () if p.nid == row.nid and p.objcg]
    return Proof(
        "charged-cached-stack",
        f"{counted(len(charged), 'pages')} of cached kernel stacks on node {row.nid} "
        f"{'is' if len(charged) == 1 else 'are'} charged",
        tuple(
            Evidence(
                address=page.page,
                kind="kmem",
                nid=page.nid,
                page=page.page,
                objcg=page.objcg,
                memcg=snapshot.payer(page.objcg),
                note=f"in the cache of CPU {page.cpu}",
            )
            for page in charged
        ),
    )


def _not_kept(snapshot: Snapshot) -> str | None:
    return "this kernel caches no kernel stacks" if snapshot.cached_stacks is None else None


CHECK = Check(
    name="cached_stacks",
    counter="none: all stacks that CPUs keep for new tasks",
    unit="pages",
    found="pages of cached kernel stacks that are not charged",
    sources=("uncharged",),
    places=("cached",),
    rows=cached_stack_rows,
    not_kept=_not_kept,
    prove=_prove,
)
