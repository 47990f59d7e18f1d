# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Charges that move with a task
-----------------------------

On cgroup v1, a task that moves to another memcg can take its pages along
(``memory.move_charge_at_immigrate``). ``mem_cgroup_can_attach()`` charges all of them to the new
memcg in advance. Then each page changes its owner. At the end, ``__mem_cgroup_clear_mc()``
uncharges all of them from the old memcg. Meanwhile the page counters of both memcgs include them.
See :mod:`memcg_inspect.linux.mm.memcontrol_move`.
"""

from __future__ import annotations

import re

from memcg_inspect.checks.check import Explained
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.report import Row

__all__ = ("being_moved",)

_MOVES = re.compile(r"mem_cgroup_(move|can_attach)")


def being_moved(snapshot: Snapshot, row: Row) -> Explained | None:
    """Return why the page counter ``memory`` of a memcg differs from the pages that it owns."""
    moving = snapshot.moving
    if moving is None:
        return None
    if row.memcg == moving.target:
        held = moving.precharged + moving.moved_swap
        reason = f"a task that moves here has charged {counted(held, 'pages')} in advance"
    elif row.memcg == moving.source:
        held = moving.moved
        reason = f"a task that moves away still has {counted(held, 'pages')} charged here"
    else:
        return None
    rest = row.off - held
    known = not rest or _moves(snapshot, abs(rest))
    return Explained("in-flight" if known else "unverifiable", reason, rest) if held else None


def _moves(snapshot: Snapshot, pages: int) -> bool:
    """Return whether a task is moving a folio of so many pages."""
    size = pages * snapshot.image.page_size
    return any(
        held.kind == "folio" and held.bytes == size
        for task in snapshot.running
        if any(map(_MOVES.match, task.functions))
        for held in task.held or ()
    )
