# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``released``
---------------------

Each memcg whose last css reference is gone is about to be freed: a work item, or an RCU callback
that queues one, is on its way (``css_release()``, ``css_release_work_fn()``). A memcg that nothing
will free is a leak, and so is all that it still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.model_freeing import Transient
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "released_rows")

_UNSURE = "what frees a released memcg may be on a CPU that was stopped"


def _released(snapshot: Snapshot) -> Sequence[Transient]:
    return snapshot.transients.get(0, ())


def _leaked(snapshot: Snapshot) -> list[Transient]:
    return [memcg for memcg in _released(snapshot) if memcg.freed_by is None]


def released_rows(snapshot: Snapshot) -> list[Row]:
    """Count the released memcgs that something will free."""
    total, leaked = len(_released(snapshot)), _leaked(snapshot)
    row = make_row(
        RowKey("released", "css", "references"), {"pending": total - len(leaked)}, {"memcgs": total}
    )
    # A CPU may have taken the callback off its list, and not have called it yet.
    busy = any(cpu.busy for cpu in snapshot.running)
    if row.status == "differs" and busy and all(memcg.unsure for memcg in leaked):
        row = replace(row, status="unverifiable", reason=_UNSURE)
    return [row]


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    leaked = _leaked(snapshot)
    return Proof(
        "leaked-memcg",
        f"{counted(len(leaked), 'released memcgs')} {'was' if len(leaked) == 1 else 'were'} not "
        "freed, and nothing will free them: no work item and no RCU callback is queued",
        tuple(
            Evidence(address=memcg.address, kind="mem_cgroup", note=memcg.what) for memcg in leaked
        ),
    )


CHECK = Check(
    name="released",
    counter="none: memcgs whose last css reference is gone",
    unit="references",
    found="those that a queued work item, a worker or an RCU callback will free",
    sources=("pending",),
    places=("memcgs",),
    rows=released_rows,
    prove=_prove,
)
