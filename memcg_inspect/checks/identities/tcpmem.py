# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``tcpmem``
-------------------

On cgroup v1, for each memcg: the page counter ``tcpmem`` is the pages that its sockets have
charged. Sockets are charged in memcgs with a limit for TCP (``memcg->tcpmem_active``), whatever
their protocol. Counters of the children are subtracted before the comparison.
"""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.identities import sock
from memcg_inspect.checks.identities.sock import sock_doubt, sock_pages
from memcg_inspect.checks.page_counters import of_counter, only_on_v1, own_usage, page_counter_row
from memcg_inspect.checks.rows import RowKey, doubted, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Row

__all__ = ("CHECK", "tcpmem_rows")

NAME = "tcpmem"


def tcpmem_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the memory of the sockets of each memcg with its page counter."""
    usage = of_counter(snapshot, NAME)
    own, rows = own_usage(snapshot, usage), []
    missing = missing_if(snapshot.why_missing("sock"))
    for memcg, pages in sock_pages(snapshot).items():
        key = RowKey("tcpmem", "tcpmem.usage", "pages", memcg)
        row = page_counter_row(snapshot, key, {"sock": pages}, own[memcg], usage, missing)
        rows.append(doubted(row, sock_doubt(snapshot, memcg)))
    return rows


CHECK = Check(
    name="tcpmem",
    counter="the page counter behind `memory.kmem.tcp.usage_in_bytes` of cgroup v1",
    unit="pages",
    found="memory charged by sockets",
    sources=("sock",),
    places=("page_counter",),
    rows=tcpmem_rows,
    page_counters=(NAME,),
    not_kept=only_on_v1(NAME, "sockets"),
    of_subtrees=True,
    half_done=sock.CHECK.half_done,
)
