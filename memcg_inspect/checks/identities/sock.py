# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``sock``
-----------------

For each memcg: ``MEMCG_SOCK`` is the pages that its sockets have charged. See
``mem_cgroup_charge_skmem()``.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import FLUSH, SOCK, HalfDone, pattern
from memcg_inspect.checks.rows import Missing, RowKey, counter_row, doubted, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "sock_doubt", "sock_pages", "sock_rows")

ITEM = "MEMCG_SOCK"


def sock_pages(snapshot: Snapshot) -> dict[int, int]:
    """Return the pages that sockets have charged, by live memcg."""
    found, page = snapshot.by_memcg("sock"), snapshot.image.page_size
    # Sockets charge whole pages. MPTCP sockets do so only together.
    return {m.address: (found[m.address].bytes + page // 2) // page for m in snapshot.live()}


def sock_doubt(snapshot: Snapshot, memcg: int) -> Missing | None:
    """Return why the sockets of a memcg may have charged other amounts than were found."""
    usage = snapshot.sockets_by_payer.get(memcg)
    if usage is None or not usage.unknown:
        return None
    # A doubt in both directions includes one in a single direction.
    sock = max(usage.unknown, key=lambda sock: sock.either_way)
    return Missing(sock.reason, sock.either_way)


def sock_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the memory of sockets with its counter, by memcg."""
    missing = missing_if(snapshot.why_missing("sock"))
    rows = []
    for memcg, pages in sock_pages(snapshot).items():
        key = RowKey("sock", ITEM, "pages", memcg)
        row = counter_row(snapshot, key, {"sock": pages}, missing)
        rows.append(doubted(row, sock_doubt(snapshot, memcg)))
    return rows


def _not_kept(snapshot: Snapshot) -> str | None:
    if snapshot.features.default_hierarchy:
        return None
    return "cgroup v1 charges sockets to a separate page counter"


CHECK = Check(
    name="sock",
    counter="`MEMCG_SOCK`",
    unit="pages",
    found="memory charged by sockets",
    sources=("sock",),
    places=("folded", "pending_cpu"),
    rows=sock_rows,
    items=(ITEM,),
    not_kept=_not_kept,
    half_done=HalfDone(
        pattern(SOCK, FLUSH), lambda snapshot: snapshot.limits.charge_batch, kinds=()
    ),
)
