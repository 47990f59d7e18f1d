# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``sock_bytes``
-----------------------

For each memcg: each of its sockets has charged whole pages. The charged bytes in the queues of the
socket and its ``sk_forward_alloc`` add up to whole pages. See ``__sk_mem_schedule()`` and
``sk_mem_charge()``.
"""

from __future__ import annotations

from dataclasses import replace

from memcg_inspect.checks.check import Check, Proof
from memcg_inspect.checks.half_done import SOCK, HalfDone, pattern
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.sockets import SockRemainder
from memcg_inspect.model import counted
from memcg_inspect.report import Evidence, Row

__all__ = ("CHECK", "sock_bytes_rows")


def sock_bytes_rows(snapshot: Snapshot) -> list[Row]:
    """Count the sockets that have charged whole pages, by memcg."""
    rows = []
    for memcg, usage in snapshot.sockets_by_payer.items():
        row = make_row(
            RowKey("sock_bytes", "sk_forward_alloc", "references", memcg),
            {"whole_pages": usage.total - len(usage.remainders)},
            {"sockets": usage.total},
        )
        reason = next((sock.reason for sock in usage.unknown if sock.has_remainder), None)
        if reason is None and snapshot.ledger.may_miss("sock"):
            reason = "sockets are not all in the image"
        if reason is None and memcg in snapshot.counters.partial:
            reason = "removed memcgs below this one, whose sockets it has, may not be in the image"
        if row.status == "exact" and reason is not None:
            row = replace(row, status="unverifiable", reason=reason)
        rows.append(row)
    return rows


def _not_kept(snapshot: Snapshot) -> str | None:
    # mem_cgroup_sk_alloc() asks tcpmem_active on cgroup v1.
    if snapshot.features.default_hierarchy or snapshot.sockets:
        return None
    return "cgroup v1 charges sockets only in memcgs with a limit for TCP"


def _prove(snapshot: Snapshot, row: Row) -> Proof:
    socks = snapshot.sockets_by_payer[row.memcg or 0].remainders
    have = "has" if len(socks) == 1 else "have"
    return Proof(
        "socket-charge-not-whole-pages",
        f"{counted(len(socks), 'sockets')} {have} not charged whole pages",
        tuple(Evidence(address=s.address, kind=s.protocol, note=_note(s)) for s in socks),
    )


def _note(sock: SockRemainder) -> str:
    side = "above" if sock.remainder > 0 else "below"
    return f"{counted(abs(sock.remainder), 'bytes')} {side} whole pages"


CHECK = Check(
    name="sock_bytes",
    counter="none: all sockets whose protocols account memory",
    unit="references",
    found=(
        "sockets whose charged bytes and `sk_forward_alloc` add up to whole pages, each by itself"
    ),
    sources=("whole_pages",),
    places=("sockets",),
    rows=sock_bytes_rows,
    not_kept=_not_kept,
    half_done=HalfDone(pattern(SOCK), lambda snapshot: 1),
    prove=_prove,
)
