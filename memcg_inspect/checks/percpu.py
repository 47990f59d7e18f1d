# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``percpu``
-------------------

For each memcg: ``MEMCG_PERCPU_B`` is the sum over its percpu allocations of their size on all
possible CPUs, and of a pointer for each ``PCPU_MIN_ALLOC_SIZE`` of one CPU's size.
"""

from __future__ import annotations

from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Row

__all__ = ("percpu_rows",)

ITEM = "MEMCG_PERCPU_B"


def percpu_rows(snapshot: Snapshot) -> list[Row]:
    """Hold percpu allocations against their counter, by memcg."""
    data = snapshot.by_memcg("percpu", "data")
    metadata = snapshot.by_memcg("percpu", "metadata")
    missing = snapshot.why_missing("percpu")
    return [
        make_row(
            "percpu",
            memcg=memcg.address,
            nid=None,
            item=ITEM,
            unit="bytes",
            found={
                "percpu": data[memcg.address].bytes,
                "metadata": metadata[memcg.address].bytes,
            },
            claimed=snapshot.own(memcg.address, ITEM),
            missing=missing,
            unread=snapshot.unread(memcg.address),
            hierarchy=snapshot.folded(memcg.address, ITEM),
        )
        for memcg in snapshot.live()
    ]
