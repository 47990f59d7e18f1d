# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Functions that charge
---------------------

One page is the most common charge, and most stacks point to a page or to an object. So rows of
pages need more evidence than that. This is the third pass over rows in flight, after
:mod:`memcg_inspect.checks.inflight` and :mod:`memcg_inspect.checks.one_charge`. It knows where the
kernel changes which counter:

* A function that charges pages changes the page counters and ``MEMCG_KMEM``, and records the owner
  of the pages, before it returns. So does one that uncharges them. A CPU that is in none of them
  has left no charge of pages half done. The same is true of page tables, which have functions of
  their own. See :attr:`memcg_inspect.checks.half_done.HalfDone.only_in`.
* These functions do not sleep while a charge is half done, with two exceptions (``SLEEPS`` of
  :mod:`memcg_inspect.checks.half_done`). So a task that sleeps elsewhere has left none, even if its
  stack has the name of such a function: a stack that cannot be unwound also shows functions
  that have returned.
* ``obj_cgroup_charge_pages()`` changes the page counter and ``MEMCG_KMEM``, one after the other. So
  a charge of kernel memory shows in both, by the same amount, unless the task is in a function that
  changes one of them. Between the two, ``try_charge_memcg()`` can let a task sleep that exceeds
  ``memory.high``.
* ``obj_cgroup_charge()`` charges whole pages for an object, and keeps what the object does not
  need. The owner of the object may be recorded much later: by ``pcpu_memcg_post_alloc_hook()``, by
  ``zswap_store()``, and up to Linux 6.9 by ``memcg_slab_post_alloc_hook()``. Meanwhile the bytes of
  the object are missing from its obj_cgroup, which shows in ``objcg_bytes``.

Rows in flight that do not agree with this are ``unverifiable``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from memcg_inspect.checks.half_done import (
    BETWEEN,
    OBJECT_KINDS,
    SLEEPS,
    THROTTLING,
    HalfDone,
    is_nearest_page,
    pattern,
)
from memcg_inspect.checks.inflight import (
    allowance_of,
    context_of,
    fitting,
    half_done_of,
    reason_of,
)
from memcg_inspect.checks.registry import check_of
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Allowance, Held, Running
from memcg_inspect.report import Row

__all__ = ("judge_charging",)

_TRY_CHARGE = pattern("try_charge")
_SLEEPS = pattern(SLEEPS)
#: Functions that show that a task can run, or that it waits for a spinlock (``PREEMPT_RT``).
_PREEMPTED = pattern("preempt_schedule", "cond_resched", "schedule_rtlock")
#: The innermost functions of a task that does not run, up to schedule() or preempt_schedule().
_SCHEDULING = 4
_BETWEEN, _THROTTLING = pattern(BETWEEN), pattern(THROTTLING)


def judge_charging(snapshot: Snapshot, rows: Sequence[Row]) -> list[Row]:
    """Return the rows. Those in flight that no function explains are unverifiable."""
    charges = _Charges(snapshot, rows)
    judged = [charges.judged(row, row.allowance) if row.allowance else row for row in rows]
    same: defaultdict[tuple[str, int | None, int | None], list[Row]] = defaultdict(list)
    for row in judged:
        if _is_restricted(row):
            same[row.item, row.nid, row.difference].append(row)
    return [
        _as_below(snapshot, now, same[now.item, now.nid, now.difference])
        if now.status != row.status
        else now
        for row, now in zip(rows, judged, strict=True)
    ]


def _as_below(snapshot: Snapshot, row: Row, others: Sequence[Row]) -> Row:
    """Return a row in flight by the charge of a memcg below it, if there is one."""
    for other in others:
        if other.allowance is not None and row.memcg in set(snapshot.ancestors(other.memcg)):
            shown = other.allowance._replace(memcg=row.memcg, identity=row.identity)
            return replace(row, status="in-flight", reason=other.reason, allowance=shown)
    return row


class _Charges:
    def __init__(self, snapshot: Snapshot, rows: Sequence[Row]) -> None:
        self.snapshot = snapshot
        off = [row for row in rows if row.status != "exact"]
        self.lacking = [row for row in off if _is_of_objcg(row)]
        # By the items of rows: memcgs that have one in their subtree, and the rows that are off.
        self.off = _by_item(off)
        self.compared = {item: self._above(some) for item, some in _by_item(rows).items()}

    def _above(self, rows: Iterable[Row]) -> Set[int]:
        """Return the memcgs of some rows, and their ancestors."""
        memcgs = {row.memcg for row in rows}
        return {above for memcg in memcgs for above in self.snapshot.ancestors(memcg)}

    def judged(self, row: Row, shown: Allowance) -> Row:
        """Return a row, unverifiable if its charge does not agree with the rules above."""
        half_done = half_done_of(row)
        if not _is_restricted(row) or half_done is None:
            return row
        judged = self._precharged(row, shown, half_done)
        if judged is None and not any(_is_in(half_done, task) for task in self._tasks(shown)):
            return _unverifiable(
                row, f"{shown.comm} ({shown.pid}) was in no function that makes such charges"
            )
        others = [i for i in half_done.shows_in if row.memcg in self.compared.get(i, ())]
        shows = any(self._shows(row, other) for item in others for other in self.off[item])
        is_between = any(_is_between(task, row) for task in self._tasks(shown))
        of_users = judged is None and _is_of_users(row, shown)
        if others and not shows and not is_between and not of_users:
            return _unverifiable(row, f"{' and '.join(others)} does not show it")
        return judged or row

    def _shows(self, row: Row, other: Row) -> bool:
        """Return whether another row can show the same charge of kernel memory."""
        if row.memcg not in set(self.snapshot.ancestors(other.memcg)):
            return False
        held = [shown.held for shown in (row.allowance, other.allowance) if shown and shown.held]
        # A batch is of user pages and of kernel memory. Nodes have parts of a charge.
        in_part = any(h.kind == "batch" for h in held) or (row.nid, other.nid) != (None, None)
        return in_part or other.status != "in-flight" or row.difference == other.difference

    def _tasks(self, shown: Allowance) -> list[Running]:
        task = shown.cpu, shown.pid
        return [cpu for cpu in self.snapshot.running if (cpu.cpu, cpu.pid) == task]

    def _precharged(self, row: Row, shown: Allowance, half_done: HalfDone) -> Row | None:
        """Return a row if it is about an object whose owner is not recorded."""
        context = context_of(self.snapshot, row)
        if shown.held is None or context is None:
            return None
        some = [shown.held, *fitting(self.snapshot, half_done, context, row)]
        held = next((held for held in some if self._is_precharge(row, held)), None)
        if held is None:
            return None
        now = allowance_of(context, held, row)
        return replace(row, allowance=now, reason=reason_of(context, now))

    def _is_precharge(self, row: Row, held: Held) -> bool:
        page_size = self.snapshot.image.page_size
        if held.kind not in OBJECT_KINDS:
            return False
        is_missing = held.bytes % page_size == 0 or any(
            row.memcg in set(self.snapshot.ancestors(other.memcg))
            and _may_lack(other, held, page_size)
            for other in self.lacking
        )
        return is_missing and is_nearest_page(held.bytes, abs(row.off), page_size)


def _by_item(rows: Iterable[Row]) -> defaultdict[str, list[Row]]:
    some: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.unit == "pages":
            some[row.item].append(row)
    return some


def _is_restricted(row: Row) -> bool:
    """Return whether a row is in flight by a charge that only some functions make."""
    half_done = half_done_of(row)
    return row.status == "in-flight" and half_done is not None and half_done.only_in is not None


def _is_in(half_done: HalfDone, task: Running) -> bool:
    """Return whether a task may have begun a charge, and not ended it."""
    may_sleep = any(map(_SLEEPS.match, task.functions))
    return half_done.is_in(task) and (may_sleep or not _is_asleep(task))


def _is_asleep(task: Running) -> bool:
    """Return whether a task waits for something, rather than to run again."""
    innermost = task.functions[:_SCHEDULING] if task.waiting else ()
    return "schedule" in innermost and not any(map(_PREEMPTED.match, innermost))


def _is_between(task: Running, row: Row) -> bool:
    """Return whether a task may have changed one of the page counter and ``MEMCG_KMEM`` only."""
    if row.item == "memory.usage" and any(map(_THROTTLING.match, task.functions)):
        return True
    # It is in such a function right now: old names are further out. Most of the time that a task is
    # in try_charge_memcg(), it reclaims memory, before the charge.
    return any(_BETWEEN.match(name) or _TRY_CHARGE.match(name) for name in task.functions[:1])


def _is_of_objcg(row: Row) -> bool:
    half_done = check_of(row).half_done
    return half_done is not None and half_done.modulo


def _may_lack(row: Row, held: Held, page_size: int) -> bool:
    """Return whether the bytes of an object may be missing from its obj_cgroup."""
    half_done, amount = half_done_of(row), held.bytes
    shows = half_done is not None and half_done.is_off_by(row, amount, page_size)
    return shows or row.status != "in-flight"


def _is_of_users(row: Row, shown: Allowance) -> bool:
    """Return whether a row may be in flight by a charge of user pages, page cache or sockets."""
    is_kernel_memory = shown.held is not None and shown.held.kind in (*OBJECT_KINDS, "kmem")
    return "lru" in check_of(row).sources and not is_kernel_memory


def _unverifiable(row: Row, why: str) -> Row:
    return replace(row, status="unverifiable", reason=f"{row.reason}, but {why}", allowance=None)
