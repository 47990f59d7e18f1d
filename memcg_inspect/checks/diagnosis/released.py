# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Cause: a memcg that was released, and that nothing will free
------------------------------------------------------------

It is in no list any more, so what is charged to it has no owner. Its ancestors have counted that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Differences, Signature, View, added
from memcg_inspect.checks.diagnosis.effects import (
    Charge,
    Payer,
    counter,
    taken_from,
    taken_from_all,
)
from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.identities import swap
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.model import counted
from memcg_inspect.model_freeing import Transient

__all__ = ("CAUSES",)


def _leaked(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    """Yield all of these memcgs as one fault, as their finding does."""
    d = view.differences
    leaked = [memcg for memcg in d.snapshot.transients.get(0, ()) if memcg.freed_by is None]
    if len(leaked) != amount:
        return
    parents = {memcg.parent for memcg in leaked}
    parent = parents.pop() if len(parents) == 1 else None
    yield Hypothesis(
        PROVED["leaked-memcg"].cause,
        tuple(memcg.address for memcg in leaked),
        (),
        None,
        key.item,
        amount,
        "references",
        added(Signature({key: amount}), *(_lost(d, memcg) for memcg in leaked)),
        # It is in no list, so it has no path. Its parent may have one.
        place=f" below memcg {parent:#x}" if parent in d.snapshot.memcgs else "",
    )


def _lost(d: Differences, memcg: Transient) -> Signature:
    """Return what is charged to a memcg that is in no list, and the references that it holds."""
    snapshot = d.snapshot
    payer = snapshot.payer(memcg.parent or 0)
    if memcg.address in snapshot.memcgs or payer is None:
        return Signature({})
    rows: Counter[RowKey] = Counter()
    for stock in snapshot.charge_stocks:
        if stock.memcg == memcg.address:
            rows[RowKey("usage", "memory.usage", "pages", payer)] += stock.nr_pages
    for address, some in snapshot.transients.items():
        objcg = snapshot.objcgs.get(address)
        if objcg is not None:
            held = sum(t.references for t in some if t.address == memcg.address)
            owner = snapshot.payer(address)
            rows[RowKey("references", "refcnt", "references", owner, objcg.nid, address)] += held
    pages = memcg.sock_pages
    entries = snapshot.swap_ids.get(memcg.swap_id, 0) if memcg.swap_id else 0
    for name in ("swap", "memsw"):
        rows[RowKey("swap_usage", f"{name}.usage", "pages", payer)] += entries
    return added(
        Signature({key: lost for key, lost in rows.items() if d.has(key)}),
        counter(d, swap.ITEM, payer, None, "cpu", entries),
        taken_from_all(d, memcg.address, payer),
        # Sockets are found by the memcgs in lists only, so what they charged is a counter's.
        taken_from(d, Payer(payer, None), Charge("sock", "", None, pages * d.page, 0)),
    )


def _say(h: Hypothesis) -> str:
    number = counted(h.amount, "released memcgs")
    were, them = ("was", "it") if h.amount == 1 else ("were", "them")
    return (
        f"{number}{h.place} {were} not freed, and nothing will free {them}: no work item and no "
        "RCU callback is queued"
    )


CAUSES = (
    Cause(
        PROVED["leaked-memcg"].cause,
        ("released",),
        _leaked,
        _say,
        PROVED["leaked-memcg"].functions,
        PROVED["leaked-memcg"].meaning,
    ),
)
