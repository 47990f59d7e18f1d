# SPDX-License-Identifier: LGPL-2.1-or-later
"""What may hold references to memcgs for a moment, read only where references differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from drgn import FaultError

from memcg_inspect.checks.identities import css_refs, id_refs, swap, swap_usage
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.block.loop import busy_loops
from memcg_inspect.linux.kernel.module import foreign_modules
from memcg_inspect.linux.kernel.stacktrace_refs import Freeing, stack_refs
from memcg_inspect.linux.mm.backing_dev import released_cgwbs
from memcg_inspect.linux.net.sock_destruct import (
    broadcast_sockets,
    closing_sockets,
    deferred_sockets,
    freed_sockets,
)
from memcg_inspect.model import Coverage
from memcg_inspect.report import Row

__all__ = ("with_css_stacks",)

_IDENTITIES = tuple(
    check.name for check in (css_refs.CHECK, id_refs.CHECK, swap.CHECK, swap_usage.CHECK)
)


def with_css_stacks(image: Image, snapshot: Snapshot, rows: Iterable[Row]) -> Snapshot:
    """
    Return the snapshot, with what holds references for a moment to the memcgs whose rows differ.

    These holders are tasks, and sockets and writebacks that are being freed.

    :param rows: rows of the snapshot without them
    """
    memcgs = {row.memcg for row in rows if row.status == "differs" and row.identity in _IDENTITIES}
    wanted = {memcg for memcg in memcgs if memcg is not None}
    if not wanted:
        return snapshot
    try:
        coverage = Coverage()
        others = _why_others(image) or _why_callbacks(snapshot)
        stacks = stack_refs(image, wanted, coverage, _freeing(image))
        holders = dict(snapshot.css_holders)
        try:
            holders["closing"] = closing_sockets(image, wanted)
        except (FaultError, UnknownKernelError) as error:
            others = f"sockets that are being freed could not be read ({error})"
        if others is None and coverage.unreadable:
            others = "kernel stacks of tasks, which may hold references, are not all in the image"
    except Exception as error:
        # On a running kernel, memory that was freed and reused can lead to any error.
        if not image.is_moving:
            raise
        others, stacks = f"what may hold references changed meanwhile ({error})", {}
        holders = dict(snapshot.css_holders)
    return replace(snapshot, css_stacks=stacks, css_others=others, css_holders=holders)


def _freeing(image: Image) -> list[Freeing]:
    finders = (freed_sockets, deferred_sockets, broadcast_sockets, released_cgwbs)
    return [some for some in (find(image) for find in finders) if some is not None]


def _why_callbacks(snapshot: Snapshot) -> str | None:
    # It takes the callbacks off all lists before it calls them.
    for cpu in snapshot.running:
        if "rcu_do_batch" in cpu.functions:
            return f"RCU callbacks that CPU {cpu.cpu} is calling may hold references"
    return None


def _why_others(image: Image) -> str | None:
    """Return why there may be holders that are not read one by one; ``None`` if there are none."""
    try:
        for name in foreign_modules(image):
            return f"the out-of-tree module {name} may hold references"
        for name in busy_loops(image):
            return f"requests in flight on {name} may hold references"
    except (FaultError, LookupError, UnknownKernelError) as error:
        return f"modules and loop devices, which may hold references, could not be read ({error})"
    return None
