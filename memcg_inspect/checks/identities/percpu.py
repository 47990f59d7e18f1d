# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``percpu``
-------------------

For each memcg: ``MEMCG_PERCPU_B`` is the sum over its percpu allocations of their size on all
possible CPUs, and of a pointer for each ``PCPU_MIN_ALLOC_SIZE`` of one CPU's size. See
``pcpu_obj_full_size()``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Charges, Check
from memcg_inspect.checks.half_done import FLUSH, PERCPU, HalfDone, pattern
from memcg_inspect.checks.rows import RowKey, counter_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "percpu_rows")

ITEM = "MEMCG_PERCPU_B"


def percpu_rows(snapshot: Snapshot) -> list[Row]:
    """Compare percpu allocations with their counter, by memcg."""
    data = snapshot.by_memcg("percpu", "data")
    metadata = snapshot.by_memcg("percpu", "metadata")
    missing = missing_if(snapshot.why_missing("percpu"))
    return [
        counter_row(
            snapshot,
            RowKey("percpu", ITEM, "bytes", memcg.address),
            {"percpu": data[memcg.address].bytes, "metadata": metadata[memcg.address].bytes},
            missing,
        )
        for memcg in snapshot.live()
    ]


CHECK = Check(
    name="percpu",
    counter="`MEMCG_PERCPU_B`",
    unit="bytes",
    found=(
        "percpu allocations on all possible CPUs, and a pointer for each 4 bytes of one CPU's "
        "copy (`pcpu_obj_full_size()`)"
    ),
    sources=("percpu", "metadata"),
    places=("folded", "pending_cpu"),
    rows=percpu_rows,
    items=(ITEM,),
    half_done=HalfDone(
        pattern(PERCPU, FLUSH), lambda snapshot: snapshot.limits.percpu, kinds={"percpu"}
    ),
    charges=Charges(("percpu",)),
)
