# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``updated``
--------------------

For each memcg: the counters that a CPU has changed, and that are not folded yet, will be folded.
The memcg is on that CPU's list of updated ones, which the next flush takes it from
(``css_rstat_updated()``; ``cgroup_rstat_updated()`` up to 6.15). What children handed up
(``state_pending``) is folded with the changes of any CPU.

A CPU does not put a memcg on its list if it sees it there. It may not see yet that a flush, on
another CPU, has just taken it off ("may race" in ``cgroup_rstat_updated()``). Then the changes of
that moment are folded only when the CPU changes the memcg again. Such *lost* updates are legal.
They are rare, and each concerns few counters. So changes of a CPU that has the memcg on no list are
a finding if they are of more than :data:`_MOST_LOST` counters, or if more than 2 + n/64 pairs of a
memcg and a CPU have such changes, where n is the number of all pairs.

Nodes without memory are not flushed. Their counters are left out. Where a node may have had no
memory for a time, changes of then may be on no list: a memcg with such changes is unverifiable.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check, Explained, Proof
from memcg_inspect.checks.half_done import FLUSH, name_of, pattern
from memcg_inspect.checks.identities.levels import unsteady
from memcg_inspect.checks.rows import Missing, RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running, counted
from memcg_inspect.model_counters import Unfolded
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "updated_rows")

#: The most counters that a CPU changes while it does not see what a flush wrote.
_MOST_LOST = 3
#: So many lost updates are legal, however few memcgs and CPUs there are.
_FEW = 2
#: In addition, one in so many pairs of a memcg and a CPU may have lost an update.
_RARE = 64
#: Functions that take memcgs off lists, and fold them.
_FLUSHES = pattern(FLUSH, r"c(ss|group)_rstat_(flush|updated_list|push_children|cpu_pop_updated)")
#: The least number of frames of a stack that could be unwound.
_UNWOUND = 3
_UNREAD = "lists of updated memcgs are not all in the image"
_PARTIAL = "counters of the memcg, or of one of its nodes, are not in the image"


def updated_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the counters with unfolded changes with those that a flush will fold."""
    may_be_lost = _may_be_lost(snapshot)
    rows = []
    for memcg in snapshot.memcgs:
        key = RowKey("updated", "unfolded counters", "references", memcg)
        left = snapshot.unfolded.get(memcg)
        if left is None:
            rows.append(make_row(key, {}, None, unread=snapshot.unread(memcg)))
            continue
        on_list = sum(len(n) for cpu, n in left.changed.items() if left.updated.get(cpu))
        if any(left.updated.values()):
            on_list += len(left.pending)
        lost = sum(map(len, _lost(left).values())) if may_be_lost else 0
        total = sum(map(len, left.changed.values())) + len(left.pending)
        missing = None
        if _is_unknown(left, snapshot.image.cpus):
            missing = Missing(_UNREAD)
        elif on_list + lost == total:
            missing = _unsteady(left)
            if not left.complete:
                missing = Missing(_PARTIAL)  # A difference in what was read stays a difference.
        found = {"listed": on_list, "lost": lost} if lost else {"listed": on_list}
        rows.append(make_row(key, found, {"changed": total}, missing))
    return rows


def _unsteady(left: Unfolded) -> Missing | None:
    """Return whether changes on a node that had no memory for a time may be on no list."""
    for cpu, nid in left.unsteady.items():
        listed = left.updated.get(cpu) if cpu is not None else any(left.updated.values())
        if not listed:
            return Missing(unsteady(nid))
    return None


def _is_unknown(left: Unfolded, cpus: int) -> bool:
    """Return whether a list that could not be read may have changes to fold."""
    if left.pending and not any(left.updated.values()) and len(left.updated) < cpus:
        return True
    return not left.changed.keys() <= left.updated.keys()


def _off_list(left: Unfolded) -> dict[int, tuple[str, ...]]:
    """Return the counters that CPUs changed without a list to fold them from."""
    return {cpu: names for cpu, names in left.changed.items() if left.updated.get(cpu) is False}


def _lost(left: Unfolded) -> dict[int, tuple[str, ...]]:
    """Return those of them that one lost update explains."""
    return {cpu: names for cpu, names in _off_list(left).items() if len(names) <= _MOST_LOST}


def _may_be_lost(snapshot: Snapshot) -> bool:
    lost = sum(len(_lost(left)) for left in snapshot.unfolded.values())
    return lost <= _FEW + len(snapshot.memcgs) * snapshot.image.cpus // _RARE


def _explain(snapshot: Snapshot, row: Row) -> Explained | None:
    """
    Return why a row is unverifiable: a stopped flush may have taken the memcg off the list.

    It takes all memcgs of a subtree off the list of one CPU, and folds one after the other.
    """
    stopped = [cpu for cpu in snapshot.running if cpu.busy and _may_flush(cpu)]
    cpus = {cpu for left in snapshot.unfolded.values() for cpu in _off_list(left)}
    if not stopped or len(cpus) > len(stopped):
        return None
    return Explained("unverifiable", f"a flush may be half done: {name_of(stopped[0])}")


def _may_flush(cpu: Running) -> bool:
    return len(cpu.functions) < _UNWOUND or any(map(_FLUSHES.match, cpu.functions))


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    memcg = row.memcg or 0
    left = snapshot.unfolded[memcg]
    off = _off_list(left)
    if _may_be_lost(snapshot):
        off = {cpu: names for cpu, names in off.items() if cpu not in _lost(left)}
    notes = [f"CPU {cpu}: {', '.join(names)}" for cpu, names in off.items()]
    if left.pending and not any(left.updated.values()):
        notes.append(f"state_pending: {', '.join(left.pending)}")
    number = counted(row.off, "counters")
    return Proof(
        "never-folded",
        f"changes of {number} are not folded, and the memcg is on no list to fold them from "
        f"({'; '.join(notes)})",
        tuple(Evidence(address=memcg, kind="mem_cgroup", memcg=memcg, note=n) for n in notes),
    )


CHECK = Check(
    name="updated",
    counter="all counters and events of the memcg and its nodes that have unfolded changes",
    unit="references",
    found=(
        "those that the next flush folds, and those that it does not fold because a single update "
        "was lost, which is legal"
    ),
    sources=("listed", "lost"),
    places=("changed",),
    rows=updated_rows,
    counters_only=True,
    explain=_explain,
    prove=_prove,
)
