# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What was under way when a machine was stopped
---------------------------------------------

Reads what can explain rows that differ: what each CPU was doing, and what will free the objects
that are being freed.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.released import RELEASED, Pending
from memcg_inspect.image.image import Image
from memcg_inspect.linux.kernel.stacktrace import read_running, read_waiting
from memcg_inspect.model import Coverage
from memcg_inspect.model_freeing import Transient

__all__ = ("with_pending", "with_running", "with_unlisted", "with_waiting")


def with_running(image: Image, snapshot: Snapshot) -> Snapshot:
    """
    Return a snapshot with what each CPU was doing.

    This takes as long as reading all slabs.
    """
    unread = Coverage()
    running = read_running(image, snapshot.memcgs, snapshot.objcgs, _released(snapshot), unread)
    if unread.unreadable:
        # Nobody knows what such a CPU has left half done.
        snapshot = replace(snapshot, coverage={**snapshot.coverage, "cpus": unread})
    return replace(snapshot, running=running)


def with_waiting(image: Image, snapshot: Snapshot) -> Snapshot | None:
    """
    Return a snapshot of a running kernel with what tasks on no CPU were doing.

    :return: ``None`` if that cannot be read because tasks come and go
    """
    try:
        waiting = read_waiting(image, snapshot.memcgs, snapshot.objcgs, _released(snapshot))
    except Exception:
        # On a running kernel, memory that was freed and reused can lead to any error.
        return None
    return replace(snapshot, running=waiting)


def _released(snapshot: Snapshot) -> set[int]:
    """Return the memcgs that are in no list any more, ``struct mem_cgroup *``."""
    return {memcg.address for memcg in snapshot.transients.get(0, ())} - snapshot.memcgs.keys()


def with_unlisted(image: Image, snapshot: Snapshot) -> Snapshot:
    """
    Return a snapshot in which zswap entries are missing that are on no LRU list and in no task.

    Such entries may have been charged, and are not in the ledger. If a task stores one, its stack
    points to it, and the charge is looked for among what the task may have left half done.
    """
    if not snapshot.unlisted_zswap:
        return snapshot
    snapshot = with_running(image, snapshot)
    shown = {h.address for cpu in snapshot.running for h in cpu.held or () if h.kind == "zswap"}
    unknown = [address for address in snapshot.unlisted_zswap if address not in shown]
    if not unknown:
        return snapshot
    # A session keeps the snapshot for other commands.
    coverage, ledger = deepcopy(snapshot.coverage), deepcopy(snapshot.ledger)
    for address in unknown:
        reason = "it was not found on an LRU list, and no task stores it"
        coverage["zswap"].miss("zswap entry", address, reason)
    ledger.note_missing("zswap")
    return replace(snapshot, coverage=coverage, ledger=ledger)


def with_pending(image: Image, snapshot: Snapshot) -> Snapshot:
    """
    Return a snapshot with what will free the objects that are being freed.

    A removed memcg without references is one of them, even if ``css_release_work_fn()`` has not
    taken it off the list of its parent's children yet.
    """
    unused = [
        Transient(RELEASED, address)
        for address, css in snapshot.css.items()
        if css.refs == 0 and snapshot.memcgs[address].state == "dying"
    ]
    if not snapshot.transients and not unused:
        return snapshot
    pending = Pending(image)
    transients = {
        objcg: [pending.of(transient) for transient in some]
        for objcg, some in snapshot.transients.items()
    }
    # css_release() queues the work item after the last reference is gone.
    found = [pending.of(transient)._replace(unsure=True) for transient in unused]
    transients[0] = [*transients.get(0, ()), *found]
    return replace(snapshot, transients=transients)
