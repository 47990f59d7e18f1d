# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rows in flight
--------------

A crash, or stopping a machine, stops each CPU at any point. A CPU may have left a charge half done
(:mod:`memcg_inspect.checks.half_done`). Such a charge leaves evidence: the CPU is in a function
that makes charges, and its registers or its stack point to what is charged and to who pays. Here,
"CPU" also stands for a task that was preempted or blocked in the kernel.

A row that differs is

``in-flight``
    if a CPU points to its memcg, or to something that the memcg pays for, and the difference is
    exactly what this charge is
``unverifiable``
    if a CPU was where such charges are made, the difference is no more than one charge can be, and
    the evidence is missing: the CPU's stack is not in the image, or does not show the amount
``differs``
    otherwise, and that is a finding

A CPU makes one charge at a time, and one more in an interrupt. In the rows of one identity a charge
shows in those of one memcg and of its ancestors, always with the same amount. If more rows differ
than the CPUs can have left half done, all of them are findings.

If all CPUs were idle, and no task was preempted or blocked, no charge was half done. An identity
may have other explanations (:attr:`memcg_inspect.checks.check.Check.explain`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memcg_inspect.checks.half_done import HalfDone, name_of
from memcg_inspect.checks.registry import check_of, check_of_item
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Allowance, Held, Running, counted
from memcg_inspect.report import Row

__all__ = (
    "Context",
    "allowance_of",
    "by_cell",
    "context_of",
    "fitting",
    "half_done_of",
    "is_same_charge",
    "mark_in_flight",
    "of_several",
    "possible_contexts",
    "reason_of",
    "shown_by",
    "where",
)

#: The least number of frames of a stack that could be unwound.
_UNWOUND = 3
#: The most CPUs and tasks that a reason names.
_MOST_PLACES = 4
#: More rows than there are: a flush can change all counters of a memcg.
_ALL_ROWS = 1 << 32
#: Functions that show that an interrupt came. Charges can be half done in it, and below it.
_INTERRUPT = re.compile(
    r"_*(asm_)?(sysvec|common_interrupt|handle_softirqs|do_softirq|irq_exit|el1)"
)
#: Functions that charge one object to several obj_cgroups, where kernel memory is counted by node.
_SPLIT = re.compile(r"pcpu_|__alloc_percpu|free_percpu|zswap_")

#: Memcg, node, item and difference of a row.
_Half = tuple[int | None, int | None, str, int | None]
#: Identity, node and item of a row.
_Cell = tuple[str, int | None, str]


def possible_contexts(snapshot: Snapshot, row: Row) -> list[Context]:
    """Return the CPUs that may have left half done what a row is off by."""
    half_done = half_done_of(row)
    if half_done is None:
        return []
    return _possible(snapshot, half_done, row, list(_contexts(snapshot, half_done)))


def context_of(snapshot: Snapshot, row: Row) -> Context | None:
    """Return the task that explains a row; ``None`` if none does."""
    shown = row.allowance
    if row.status != "in-flight" or shown is None:
        return None
    for context in possible_contexts(snapshot, row):
        if (context.cpu.cpu, context.cpu.pid) == (shown.cpu, shown.pid):
            return context
    return None


def mark_in_flight(snapshot: Snapshot, rows: Sequence[Row]) -> list[Row]:
    """Return the rows. Those that differ, and that half-done charges may explain, are marked."""
    marked = [_explained(snapshot, row) if row.status == "differs" else row for row in rows]
    differing: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, row in enumerate(marked):
        if row.status == "differs":
            differing[row.identity, row.item if _is_of_subtrees(row) else ""].append(number)
    cells = by_cell(marked) if differing else {}
    for numbers in differing.values():
        half_done = half_done_of(marked[numbers[0]])
        if half_done is not None:
            _mark(snapshot, half_done, marked, numbers, cells)
    return marked


def by_cell(rows: Sequence[Row]) -> Mapping[_Cell, list[int]]:
    """Return the indexes of the rows that have a difference, by identity, node and item."""
    cells: defaultdict[_Cell, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        if row.difference:
            cells[_cell(row)].append(number)
    return cells


def _cell(row: Row) -> _Cell:
    return row.identity, row.nid, row.item


def _is_of_subtrees(row: Row) -> bool:
    half_done = check_of(row).half_done
    return half_done is not None and half_done.in_many_rows


def half_done_of(row: Row) -> HalfDone | None:
    """Return how the charges of a row are made; ``None`` if none can be half done."""
    half_done, counter = check_of(row).half_done, check_of_item(row.item)
    if not _is_of_subtrees(row) or counter is None or counter.half_done is None:
        return half_done
    # A charge shows in the counters of subtrees as it does in those of its memcg.
    return replace(counter.half_done, in_many_rows=True)


def _mark(
    snapshot: Snapshot,
    half_done: HalfDone,
    rows: list[Row],
    numbers: Sequence[int],
    cells: Mapping[_Cell, Sequence[int]],
) -> None:
    """
    Mark the rows of one identity, and of one counter of subtrees, that charges may explain.

    :param numbers: indexes of the rows that differ
    :param cells: see :func:`by_cell`
    """
    contexts = list(_contexts(snapshot, half_done))
    possible = {
        n: some for n in numbers if (some := _possible(snapshot, half_done, rows[n], contexts))
    }
    if len(possible) > sum(context.most_rows for context in contexts):
        return
    taken: defaultdict[tuple[int, int], list[Row]] = defaultdict(list)

    def choices(n: int) -> int:
        return sum(shown_by(snapshot, half_done, c, rows[n]) is not None for c in possible[n])

    # Rows that fewer CPUs can explain come first, so that these are not used up by others.
    for n in sorted(possible, key=choices):
        rows[n] = _judged(snapshot, half_done, rows[n], possible[n], taken)
    if not half_done.in_many_rows:
        halves = _other_halves(snapshot, [rows[n] for n in numbers])
        for n in possible:
            rows[n] = of_several(snapshot, rows, cells, rows[n])
            if (rows[n].memcg, rows[n].nid, rows[n].item, rows[n].difference) in halves:
                rows[n] = replace(rows[n], status="differs", reason=None, allowance=None)


def _other_halves(snapshot: Snapshot, rows: Sequence[Row]) -> set[_Half]:
    """
    Return the rows that are off because a row below them, which no charge explains, is.

    The counter of a child is subtracted from that of its parent. So what is wrong with it shows in
    both rows, with opposite signs.
    """
    return {
        (snapshot.memcgs[above].payer, row.nid, row.item, -row.off)
        for row in rows
        if row.status == "differs" and row.memcg is not None
        if (above := snapshot.memcgs[row.memcg].parent) is not None
    }


def _explained(snapshot: Snapshot, row: Row) -> Row:
    """Return a row that differs, with what the identity itself says of it."""
    explain = check_of(row).explain
    if explain is None:
        return row
    explained = explain(snapshot, row)
    if explained is None:
        return row
    reason = explained.reason
    if explained.rest:
        held = row.off - explained.rest
        contexts = possible_contexts(snapshot, replace(row, found={**row.found, "held": held}))
        if not contexts:
            return row
        reason += f"; a charge may be half done: {_listed(map(where, contexts))}"
    return replace(row, status=explained.status, reason=reason)


class Context(NamedTuple):
    """
    A CPU that may have left a charge of one identity half done.

    :ivar cpu: the CPU
    :ivar function: where it was, in words if that is unknown
    :ivar memcgs: the memcgs that it may have been charging; ``None`` if it may be any
    :ivar direct: what it points to itself: memcgs, obj_cgroups and call sites
    :ivar most_rows: the most rows of the identity that it can explain
    :ivar interrupted: whether an interrupt came, in which one more charge can be half done
    """

    cpu: Running
    function: str
    memcgs: frozenset[int] | None
    direct: frozenset[int]
    most_rows: int
    interrupted: bool

    @property
    def moves_many(self) -> bool:
        """Whether the CPU was changing many counters, each by an amount of its own."""
        return self.most_rows >= _ALL_ROWS


def _contexts(snapshot: Snapshot, half_done: HalfDone) -> Iterator[Context]:
    for cpu in snapshot.running:
        place = half_done.place(cpu)
        # If registers or the stack are not in the image, the CPU may have been in any function.
        if place is None and len(cpu.functions) < _UNWOUND:
            place = cpu.functions[0] if cpu.functions else "an unknown place"
        if not cpu.busy or place is None:
            continue
        direct = frozenset(
            address
            for held in cpu.held or ()
            for address in (held.payer, held.address if held.kind == "call site" else 0)
            if address
        )
        if any(map(_SPLIT.match, cpu.functions)):
            direct |= _siblings(snapshot, direct)
        payers = set(direct)
        if direct and half_done.areas:
            payers.update(run.payer for area in cpu.areas for run in area.left)
        memcgs = frozenset(above for p in payers for above in snapshot.ancestors(snapshot.payer(p)))
        rows = half_done.rows
        if half_done.in_many_rows:
            rows = max(rows, *(_depth(snapshot, memcg) for memcg in memcgs or snapshot.memcgs))
        if half_done.areas:
            rows += rows * sum(len(area.left) for area in cpu.areas)
        if half_done.flushes(cpu) or half_done.folds(cpu):
            rows = _ALL_ROWS
        interrupted = any(map(_INTERRUPT.match, cpu.functions))
        yield Context(cpu, place, memcgs or None, direct, rows * (1 + interrupted), interrupted)


def _siblings(snapshot: Snapshot, objcgs: Iterable[int]) -> frozenset[int]:
    """Return the obj_cgroups of the same sets: one is enough to find the others."""
    sets = {snapshot.objcgs[o].set for o in objcgs if o in snapshot.objcgs}
    found = (snapshot.objcg_sets[at] for at in sets if at in snapshot.objcg_sets)
    return frozenset(objcg for each in found for objcg in each.entries.values() if objcg)


def _depth(snapshot: Snapshot, memcg: int) -> int:
    return sum(1 for _ in snapshot.ancestors(memcg))


def _possible(
    snapshot: Snapshot, half_done: HalfDone, row: Row, contexts: Sequence[Context]
) -> list[Context]:
    """Return the CPUs that may have changed a row; none if its difference exceeds their charges."""
    some = [context for context in contexts if _reaches(snapshot, half_done, context, row)]
    most = sum(half_done.largest(snapshot, context.cpu, row) for context in some)
    return some if abs(row.off) <= most else []


def _reaches(snapshot: Snapshot, half_done: HalfDone, context: Context, row: Row) -> bool:
    """Return whether a CPU may have changed a row, by what it points to."""
    if half_done.subject is not None:
        sites = {held.address for held in context.cpu.held or () if held.kind == "call site"}
        return not sites or half_done.subject(snapshot, row) in sites
    if context.memcgs is None or row.memcg is None:
        return True
    if row.objcg is not None:
        return row.objcg in context.direct or row.memcg in context.direct
    return row.memcg in context.memcgs


def _judged(
    snapshot: Snapshot,
    half_done: HalfDone,
    row: Row,
    contexts: Sequence[Context],
    taken: defaultdict[tuple[int, int], list[Row]],
) -> Row:
    """
    Return a row as ``in-flight`` or ``unverifiable``.

    :param contexts: the CPUs that may have changed it
    :param taken: rows that the charge of each task explains already, by CPU and PID; the row is
        added
    """
    # The CPU that was closest to such a function is the most likely one, but one that had not begun
    # a charge, or had ended it, is not.
    for context in sorted(
        contexts, key=lambda c: (not half_done.is_in(c.cpu), _depth_of_function(c))
    ):
        others = taken[context.cpu.cpu, context.cpu.pid]
        if len(others) >= context.most_rows or not is_same_charge(snapshot, others, row):
            continue
        shown = shown_by(snapshot, half_done, context, row)
        if shown is not None:
            others.append(row)
            return replace(
                row, status="in-flight", reason=reason_of(context, shown), allowance=shown
            )
    places = _listed(
        f"at most {counted(half_done.largest(snapshot, c.cpu, row), row.unit)} of {where(c)}"
        for c in contexts
    )
    return replace(
        row,
        status="unverifiable",
        reason=f"a charge may be half done, but no stack shows this amount: {places}",
    )


def _listed(places: Iterable[str]) -> str:
    first = list(places)
    more = len(first) - _MOST_PLACES
    return "; ".join(first[:_MOST_PLACES]) + (f"; and {more:,} more" if more > 0 else "")


def _depth_of_function(context: Context) -> int:
    functions = context.cpu.functions
    return functions.index(context.function) if context.function in functions else len(functions)


def of_several(
    snapshot: Snapshot, rows: Sequence[Row], cells: Mapping[_Cell, Iterable[int]], row: Row
) -> Row:
    """
    Return a row, ``in-flight`` if charges below it that are in flight add up to its difference.

    page_counter_try_charge() goes up from the memcg. So the counter of an ancestor has not changed
    yet when those below it have.

    :param cells: see :func:`by_cell`
    """
    if row.status != "unverifiable" or row.memcg is None:
        return row
    below = [
        other
        for other in (rows[n] for n in cells.get(_cell(row), ()))
        if other.memcg != row.memcg and row.memcg in snapshot.ancestors(other.memcg)
    ]
    shown = [other.allowance for other in below if other.allowance is not None]
    total = sum(other.off for other in below)
    if not shown or len(shown) < len(below) or total != -row.off:
        return row
    reason = "; ".join(dict.fromkeys(other.reason or "" for other in below))
    allowance = shown[0]._replace(memcg=row.memcg, amount=row.off)
    return replace(row, status="in-flight", reason=reason, allowance=allowance)


def is_same_charge(snapshot: Snapshot, others: Sequence[Row], row: Row) -> bool:
    """Return whether one charge can show in these rows: of one memcg and of its ancestors."""
    for other in others:
        if other.unit == row.unit and abs(other.off) != abs(row.off):
            return False
        above, others_above = (set(snapshot.ancestors(r.memcg)) for r in (row, other))
        if not (above <= others_above or others_above <= above):
            return False
    return True


def shown_by(
    snapshot: Snapshot, half_done: HalfDone, context: Context, row: Row
) -> Allowance | None:
    """Return the charge that a CPU shows and that is what the row is off by."""
    if not _may_show(snapshot, half_done, context, row):
        return None
    found = next(iter(fitting(snapshot, half_done, context, row)), None)
    if found is None:
        amounts = half_done.amounts(snapshot, context.cpu)
        if not any(
            half_done.is_off_by(row, amount, snapshot.image.page_size)
            for amount in amounts
            if amount
        ):
            return None
    return allowance_of(context, found, row)


def _may_show(snapshot: Snapshot, half_done: HalfDone, context: Context, row: Row) -> bool:
    if half_done.subject is not None:
        return half_done.subject(snapshot, row) in context.direct
    if context.memcgs is None:
        return False  # without a memcg it is not known whose charge it is
    return row.memcg is not None or row.nid is not None


def fitting(snapshot: Snapshot, half_done: HalfDone, context: Context, row: Row) -> list[Held]:
    """Return everything that a CPU points to and whose charge is what the row is off by."""
    page = snapshot.image.page_size
    # What somebody pays for says more than what nobody pays for, or not yet.
    some = sorted(context.cpu.held or (), key=lambda held: not held.payer)
    return [h for h in some if _pays(snapshot, h, row) and half_done.fits(h, row, page)]


def allowance_of(context: Context, held: Held | None, row: Row) -> Allowance:
    """Return the record of a charge that a row shows."""
    return Allowance(
        cpu=context.cpu.cpu,
        pid=context.cpu.pid,
        comm=context.cpu.comm,
        function=context.function,
        held=held,
        memcg=row.memcg,
        amount=row.off,
        unit=row.unit,
        identity=row.identity,
        nid=row.nid,
        item=row.item,
    )


def _pays(snapshot: Snapshot, held: Held, row: Row) -> bool:
    """Return whether the memcg of a row pays for something, or may pay for it soon."""
    if not held.payer or row.memcg is None:
        return True
    if row.objcg is not None:
        return held.payer == row.objcg
    return row.memcg in snapshot.ancestors(snapshot.payer(held.payer))


def reason_of(context: Context, shown: Allowance) -> str:
    """Return why a row is in flight."""
    what = "a charge in advance" if shown.held is None else _name(shown.held)
    return f"half-done charge of {what} by {where(context)}"


def _name(held: Held) -> str:
    if held.kind == "percpu":
        return f"a percpu allocation of {counted(held.address, 'bytes')} for each CPU"
    kind = {"object": "slab object", "zswap": "zswap entry"}.get(held.kind, held.kind)
    return f"{kind} {held.address:#x} ({counted(held.bytes, 'bytes')})"


def where(context: Context) -> str:
    """Return which CPU it is, and the function that it was in."""
    return f"{name_of(context.cpu)}, in {context.function}"
