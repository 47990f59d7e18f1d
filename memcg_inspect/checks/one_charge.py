# SPDX-License-Identifier: LGPL-2.1-or-later
"""
One charge in several identities
--------------------------------

:mod:`memcg_inspect.checks.inflight` explains rows identity by identity. But a charge is one event:
what a stopped CPU shows in one identity must be what it shows in all others. This is the second
pass, over the rows of all identities. For each task it looks for the charge that explains most of
its rows. These are rows of one memcg and of its ancestors. Any other row must be explained by
another CPU, or it is ``unverifiable``: by itself it may be in flight, but not together with the
others.

A row shows only an amount. So objects of the same size cannot be distinguished here, nor can pages.
A reference count does not show the size of what was charged.

What a CPU moves from its stocks is a charge of its own: charging one memcg can drain the stock of
another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memcg_inspect.checks.half_done import OBJECT_KINDS
from memcg_inspect.checks.inflight import (
    Context,
    allowance_of,
    by_cell,
    context_of,
    fitting,
    half_done_of,
    is_same_charge,
    of_several,
    possible_contexts,
    reason_of,
    shown_by,
    where,
)
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Held
from memcg_inspect.report import Row

__all__ = ("judge_together",)

#: CPU and PID of a task, and whether it moves what is in stocks.
_Task = tuple[int, int, bool]
#: What rows show of a charge: whether it is a slab object, and its bytes.
_Size = tuple[bool, int]


class _Event(NamedTuple):
    """
    One charge that a task left half done.

    :ivar size: what is charged; ``None`` if no row shows it
    :ivar memcg: ``struct mem_cgroup *``, the lowest whose rows show it; ``None`` if none does
    """

    size: _Size | None
    memcg: int | None


class _Candidate(NamedTuple):
    """
    A row that a task explains.

    :ivar number: index of the row
    :ivar context: the task
    :ivar memcg: ``struct mem_cgroup *`` of the row
    :ivar held: what it can be that is charged
    :ivar any_size: whether the row does not show the size of the charge
    """

    number: int
    context: Context
    memcg: int | None
    held: Sequence[Held]
    any_size: bool


def judge_together(snapshot: Snapshot, rows: Sequence[Row]) -> list[Row]:
    """
    Return the rows of all identities.

    Rows in flight by charges that do not agree with each other are ``unverifiable``.
    """
    marked = list(rows)
    sums = [n for n, row in enumerate(marked) if _is_sum(snapshot, row)]
    by_task = _by_task(snapshot, marked, frozenset(sums))
    events: dict[_Task, list[_Event]] = {}
    left: list[_Candidate] = []
    for task, candidates in by_task.items():
        events[task], others = _choose(snapshot, marked, candidates)
        left += others
    for candidate in left:
        marked[candidate.number] = _unexplained(marked[candidate.number], candidate.context)
    for candidate in left:
        _explain_by_another(snapshot, marked, candidate, events)
    cells = by_cell(marked) if sums else {}
    for n in sums:
        marked[n] = of_several(snapshot, marked, cells, _sum_of_unknown(marked[n]))
    return marked


def _by_task(
    snapshot: Snapshot, rows: Sequence[Row], without: frozenset[int]
) -> Mapping[_Task, list[_Candidate]]:
    found: defaultdict[_Task, list[_Candidate]] = defaultdict(list)
    for number, row in enumerate(rows):
        context = None if number in without else context_of(snapshot, row)
        if context is not None and row.allowance is not None and not context.moves_many:
            candidate = _candidate(snapshot, number, row, context)
            found[context.cpu.cpu, context.cpu.pid, row.allowance.held is None].append(candidate)
    return found


def _candidate(snapshot: Snapshot, number: int, row: Row, context: Context) -> _Candidate:
    half_done = half_done_of(row)
    held = [] if half_done is None else fitting(snapshot, half_done, context, row)
    # A reference is one, whatever it is to.
    return _Candidate(number, context, row.memcg, held, row.unit == "references" or not held)


def _is_sum(snapshot: Snapshot, row: Row) -> bool:
    """Return whether a row is in flight by several charges to memcgs below it."""
    half_done = half_done_of(row)
    if row.status != "in-flight" or row.allowance is None or half_done is None:
        return False
    context = context_of(snapshot, row)
    return context is None or shown_by(snapshot, half_done, context, row) is None


def _choose(
    snapshot: Snapshot, rows: list[Row], candidates: list[_Candidate]
) -> tuple[list[_Event], list[_Candidate]]:
    """Return the charges that explain most rows of a task, and the rows that they do not."""
    events: list[_Event] = []
    left = candidates
    for _ in range(1 + candidates[0].context.interrupted):
        if left:
            event = max(
                _events(left), key=lambda e: sum(_agrees(snapshot, e, other) for other in left)
            )
            agreeing = [other for other in left if _agrees(snapshot, event, other)]
            left = [other for other in left if not _agrees(snapshot, event, other)]
            events.append(event)
            _name_one(rows, event, agreeing)
    return events, left


def _events(candidates: Sequence[_Candidate]) -> Iterator[_Event]:
    sizes = dict.fromkeys(_size(h) for c in candidates if not c.any_size for h in c.held)
    for memcg in dict.fromkeys(c.memcg for c in candidates):
        yield from (_Event(size, memcg) for size in sizes or (None,))


def _size(held: Held) -> _Size:
    return held.kind in OBJECT_KINDS, held.bytes


def _agrees(snapshot: Snapshot, event: _Event, candidate: _Candidate) -> bool:
    """Return whether a row can show a charge."""
    if candidate.memcg is not None and candidate.memcg not in snapshot.ancestors(event.memcg):
        return False
    return candidate.any_size or any(_size(held) == event.size for held in candidate.held)


def _name_one(rows: list[Row], event: _Event, candidates: Sequence[_Candidate]) -> None:
    """Let the rows that show a charge name the same object or pages, where they can."""
    same = {c.number: [h for h in c.held if _size(h) == event.size] for c in candidates}
    counted = Counter(held for some in same.values() for held in dict.fromkeys(some))
    for candidate in candidates:
        if same[candidate.number]:
            best = max(same[candidate.number], key=lambda held: counted[held])
            _show(rows, candidate.number, candidate.context, best)


def _show(rows: list[Row], number: int, context: Context, held: Held | None) -> None:
    shown = allowance_of(context, held, rows[number])
    reason = reason_of(context, shown)
    rows[number] = replace(rows[number], status="in-flight", reason=reason, allowance=shown)


def _unexplained(row: Row, context: Context) -> Row:
    reason = (
        f"a charge may be half done, but no stack shows it together with what differs elsewhere: "
        f"{where(context)} made one charge, and other rows show another one"
    )
    return replace(row, status="unverifiable", reason=reason, allowance=None)


def _sum_of_unknown(row: Row) -> Row:
    reason = "charges below this memcg may be half done, and not all are shown by stacks"
    return replace(row, status="unverifiable", reason=reason, allowance=None)


def _explain_by_another(
    snapshot: Snapshot, rows: list[Row], left: _Candidate, events: dict[_Task, list[_Event]]
) -> None:
    """Mark a row as in flight if another task shows its charge, and no charge but that one."""
    row, half_done = rows[left.number], half_done_of(rows[left.number])
    if half_done is None:
        return
    for context in possible_contexts(snapshot, row):
        shown = shown_by(snapshot, half_done, context, row)
        if shown is None or context.moves_many:
            continue
        others = _explained_by(rows, row, context)
        if len(others) >= context.most_rows or not is_same_charge(snapshot, others, row):
            continue
        candidate = _candidate(snapshot, left.number, row, context)
        task = (context.cpu.cpu, context.cpu.pid, shown.held is None)
        if task not in events:
            events[task], _ = _choose(snapshot, rows, [candidate])
        elif not any(_agrees(snapshot, event, candidate) for event in events[task]):
            continue
        _show(rows, left.number, context, shown.held)
        return


def _explained_by(rows: Sequence[Row], row: Row, context: Context) -> list[Row]:
    """Return the rows of the same identity that a task explains."""
    task = (context.cpu.cpu, context.cpu.pid)
    return [
        other
        for other in rows
        if other.identity == row.identity
        and other.allowance is not None
        and (other.allowance.cpu, other.allowance.pid) == task
    ]
