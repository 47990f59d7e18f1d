# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Cause: a charge that a stopped CPU left half done
-------------------------------------------------

Rows in flight have a cause, too: one charge of one task, which its stack shows. It is no fault. But
a fault may do the same to these rows, so causes that add up to exactly their differences are
named beside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memcg_inspect.checks.diagnosis.differences import Differences
from memcg_inspect.checks.diagnosis.registry import CAUSES, cause_of
from memcg_inspect.checks.diagnosis.search import each_alone
from memcg_inspect.checks.rows import row_key
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import NUMA_NO_NODE, Allowance, Held
from memcg_inspect.report import Diagnosis, Effect, Evidence, Row

__all__ = ("MEANINGS", "half_done_charges")

_NAME = "half-done"
#: Name and meaning, for the list in ``docs/output.md`` (Markdown).
MEANINGS = {_NAME: "a charge that a stopped CPU, or a task that waits, left half done: no fault"}

#: Other explanations that are named.
_MOST_OTHERS = 5
_KINDS = {
    "object": "a slab object",
    "cache": "a slab object",
    "zswap": "a zswap entry",
    "percpu": "a percpu allocation",
    "kmem": "a block of kernel memory",
    "folio": "a folio",
    "batch": "pages that are uncharged together",
}

#: CPU and PID of a task, and whether the charge is of what is in stocks.
_Task = tuple[int, int, bool]


def half_done_charges(snapshot: Snapshot, rows: Sequence[Row]) -> tuple[Diagnosis, ...]:
    """
    Return the charges that rows in flight show, those of most rows first.

    :param rows: all rows of the report
    """
    of_task: defaultdict[_Task, list[tuple[Row, Allowance]]] = defaultdict(list)
    for row in rows:
        shown = row.allowance
        if row.status == "in-flight" and shown is not None and row.difference:
            of_task[shown.cpu, shown.pid, shown.held is None].append((row, shown))
    if not of_task:
        return ()
    keys = {row_key(row) for some in of_task.values() for row, _ in some}
    # As if nothing were half done: then another cause has to explain these rows, and no others.
    off = [replace(row, status="differs") if row_key(row) in keys else row for row in rows]
    differences = Differences(snapshot, off, keys)
    found = [_of_task(differences, some) for some in of_task.values()]
    return tuple(sorted(found, key=lambda d: len(d.signature), reverse=True))


def _of_task(d: Differences, some: Sequence[tuple[Row, Allowance]]) -> Diagnosis:
    [(held, _)] = Counter(shown.held for _, shown in some).most_common(1)
    row, shown = next(pair for pair in some if pair[1].held == held)
    memcg = _lowest(d.snapshot, [row for row, _ in some])
    amount, unit = (abs(shown.amount), shown.unit) if held is None else (held.bytes, "bytes")
    charge = "a charge in advance" if held is None else f"the charge of {_KINDS[held.kind]}"
    whose = "" if memcg is None else f" of memcg {memcg:#x}"
    rows = [row for row, _ in some]
    return Diagnosis(
        cause=_NAME,
        what=f"{charge}{whose} is half done: {_where(d.snapshot, shown)} was in {shown.function}()",
        confidence="likely",
        memcgs=() if memcg is None else (memcg,),
        nid=row.nid if held is None or held.nid == NUMA_NO_NODE else held.nid,
        amount=amount,
        unit=unit,
        evidence=tuple(_evidence(d.snapshot, held)),
        evidence_total=None if held is None else 1,
        others=_others(d, rows),
        signature=tuple(
            Effect(**row_key(r)._asdict(), amount=r.off, difference=r.off) for r in rows
        ),
        functions=tuple(dict.fromkeys(shown.function for _, shown in some)),
    )


def _lowest(snapshot: Snapshot, rows: Sequence[Row]) -> int | None:
    """Return the memcg of the rows that is furthest from the root."""
    memcgs = [row.memcg for row in rows if row.memcg is not None]
    return max(memcgs, key=lambda m: len(list(snapshot.ancestors(m))), default=None)


def _where(snapshot: Snapshot, shown: Allowance) -> str:
    task = shown.cpu, shown.pid
    if any(task == (other.cpu, other.pid) and other.waiting for other in snapshot.running):
        return f"{shown.comm} ({shown.pid}), which was not running,"
    return f"CPU {shown.cpu} ({shown.comm}, {shown.pid})"


def _evidence(snapshot: Snapshot, held: Held | None) -> Iterator[Evidence]:
    """Yield what the stack or a register points to; of a percpu allocation, that is its size."""
    if held is None or held.kind == "percpu":
        return
    kind = "slab" if held.kind in ("object", "cache") else held.kind
    objcg = held.payer if held.payer in snapshot.objcgs else None
    yield Evidence(
        address=held.address,
        kind=kind,
        nid=held.nid,
        bytes=held.bytes,
        objcg=objcg,
        memcg=snapshot.payer(held.payer) if held.payer else None,
        note="the cache of the object" if held.kind == "cache" else None,
    )


def _others(d: Differences, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the faults that would do the same to these rows, in words."""
    wanted = {row_key(row): row.off for row in rows}
    said = (cause_of(h.cause).sentence(h) for h in each_alone(d, CAUSES, wanted))
    return tuple(dict.fromkeys(said))[:_MOST_OTHERS]
