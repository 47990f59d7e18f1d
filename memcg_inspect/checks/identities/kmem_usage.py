# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``kmem_usage``
-----------------------

On cgroup v1, for each memcg: the page counter ``kmem`` is all kernel memory, as in ``kmem``.
``memcg_account_kmem()`` changes it with ``MEMCG_KMEM``. Counters of the children are subtracted
before the comparison.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.identities.kmem import HALF_DONE, kmem_pages, why_kmem_missing
from memcg_inspect.checks.page_counters import of_counter, only_on_v1, own_usage, page_counter_row
from memcg_inspect.checks.rows import RowKey, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "kmem_usage_rows")

NAME = "kmem"


def kmem_usage_rows(snapshot: Snapshot) -> list[Row]:
    """Compare all kernel memory of each memcg with its page counter."""
    usage = of_counter(snapshot, NAME)
    own = own_usage(snapshot, usage)
    return [
        page_counter_row(
            snapshot,
            RowKey("kmem_usage", "kmem.usage", "pages", memcg),
            found,
            own[memcg],
            usage,
            missing_if(why_kmem_missing(snapshot, memcg)),
        )
        for memcg, found in kmem_pages(snapshot).items()
    ]


CHECK = Check(
    name="kmem_usage",
    counter="the page counter behind `memory.kmem.usage_in_bytes` of cgroup v1",
    unit="pages",
    found="pages charged as kernel memory, and the whole pages that objects are charged from",
    sources=("kmem_pages", "objects"),
    places=("page_counter",),
    rows=kmem_usage_rows,
    page_counters=(NAME,),
    not_kept=only_on_v1(NAME, "kernel memory"),
    of_subtrees=True,
    half_done=HALF_DONE,
)
