# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``css_refs``
---------------------

For each memcg except the root: ``css.refcnt`` is the number of references that were found. If there
are fewer, the memcg can be freed while something uses it. If there are more, it is never freed. See
:mod:`memcg_inspect.linux.kernel.cgroup` for who holds references.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from memcg_inspect.checks.check import Check, in_flight, references_differ
from memcg_inspect.checks.held_on_stack import doubt_of, held_on_stack
from memcg_inspect.checks.rows import Missing, RowKey, doubt_released, doubted, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.split import being_split
from memcg_inspect.model import CssRefs, Memcg, StackRef
from memcg_inspect.report import Row

__all__ = ("CHECK", "css_ref_rows", "css_references")

#: Each holds one reference while a task calls it: a charge, memory.high (a charge may wait for it),
#: the walk of the reclaim that either needs (mem_cgroup_iter()), what uncharges pages, and zswap.
#: Parts of names; a function is of the first kind that fits.
_UNCHARGE = ("uncharge",)
_CHARGE = ("charge",)
_WAIT = (("over_high",), ("shrink_", "reclaim", "mem_cgroup_iter"))
_HOLD_ONE = (_UNCHARGE, _CHARGE, *_WAIT, ("zswap_",))

#: Holders by subject of the coverage.
_HOLDERS = {
    "memcgs": "memcgs, which hold references to their parents,",
    "charge_stock": "charge stocks",
    "other_socks": "sockets of protocols without a slab cache",
    "notify": "groups of inotify and fanotify",
    "zswap_cursor": "zswap's cursors",
}


def css_ref_rows(snapshot: Snapshot) -> list[Row]:
    """Compare ``css.refcnt`` of each memcg with the references found."""
    found, why = css_references(snapshot), _why_missing(snapshot)
    return [
        _row(snapshot, memcg, found[memcg.address], why)
        for memcg in snapshot.memcgs.values()
        if memcg.parent is not None
    ]


def _row(snapshot: Snapshot, memcg: Memcg, found: Counter[str], why: str | None) -> Row:
    css: CssRefs | None = snapshot.css.get(memcg.address)
    if css is not None and not css.whole:
        why = "lists of what holds references to it are not all in the image"
    row = make_row(
        RowKey("css_refs", "css.refcnt", "references", memcg.address),
        found,
        None if css is None else {"refcnt": css.refs},
        missing_if(why),
    )
    row = doubted(row, _charged_in_interrupt(snapshot, row))
    row = doubt_released(snapshot, row)
    return doubted(row, doubt_of(snapshot, row, _most))


def _charged_in_interrupt(snapshot: Snapshot, row: Row) -> Missing | None:
    """Return why interrupts may hold references: no task's stack shows them."""
    active = [a for a in snapshot.active_memcgs if a.task is None and a.memcg == row.memcg]
    # One by the caller of set_active_memcg(), and one while it charges.
    if not active or row.off > 2 * len(active):
        return None
    return Missing(f"interrupts of {active[0].name} charge the memcg, and may hold references")


def _most(task: StackRef) -> int:
    """Return the most references to one memcg that a task holds."""
    if not task.functions:  # they are not known
        return min(task.words, len(_HOLD_ONE) + 1)
    kinds = set(filter(None, map(_kind, task.functions)))
    held = len(kinds)
    # A charge takes the reference of a page (charge_memcg()) or a stock (refill_stock()) before
    # either refers to the memcg, and after it has waited for memory. uncharge_folio() drops that
    # of the page afterwards.
    if _UNCHARGE in kinds or (_CHARGE in kinds and kinds.isdisjoint(_WAIT)):
        held += 1
    return min(task.words, max(held, 1))


def _kind(function: str) -> tuple[str, ...] | None:
    """Return which of the kinds that hold a reference a function is of."""
    return next((parts for parts in _HOLD_ONE if any(part in function for part in parts)), None)


def css_references(snapshot: Snapshot) -> defaultdict[int, Counter[str]]:
    """Return the references to each memcg that were found, by kind of holder."""
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for address, css in snapshot.css.items():
        found[address].update(
            memcg=css.base,
            # mem_cgroup_id_put() drops the reference when the last one to the ID is dropped.
            id=int(css.id_refs > 0),
            css_set=len(css.css_sets),
            mm=len(css.mms),
            writeback=len(css.writebacks),
            event=css.events,
        )
    for memcg in snapshot.memcgs.values():
        if memcg.parent is not None:
            found[memcg.parent]["child"] += 1
    for stock in snapshot.charge_stocks:
        found[stock.memcg]["stock"] += 1
    for entry, amount in snapshot.ledger:
        # Since 7.1 user pages refer to an obj_cgroup.
        if entry.kind == "sock" or (entry.kind == "lru" and not snapshot.features.lru_holds_objcg):
            found[entry.payer][entry.kind] += amount.charges
    for holder, references in snapshot.css_holders.items():
        for address, number in references.items():
            found[address][holder] += number
    return found


def _why_missing(snapshot: Snapshot) -> str | None:
    if snapshot.ledger.may_miss("sock"):
        return "sockets are not all in the image"
    if snapshot.ledger.may_miss("slab"):
        return "slabs, which contain groups of inotify and fanotify, are not all in the image"
    if not snapshot.features.lru_holds_objcg and snapshot.ledger.may_miss("lru"):
        return "user pages are not all in the image"
    for subject, holders in _HOLDERS.items():
        if not snapshot.complete(subject):
            return f"{holders} are not all in the image"
    return None


def _sentence(row: Row) -> str:
    return references_differ(
        row,
        row.item,
        "a leak; the memcg is never freed",
        "the memcg can be freed while it is used",
    )


CHECK = Check(
    name="css_refs",
    counter="`css.refcnt` of each memcg except the root",
    unit="references",
    found=(
        "the memcg itself and its ID, its children until they are freed, css_sets, stocks, "
        "sockets until they are freed, writebacks, address spaces on the list of the multi-gen "
        "LRU, groups of inotify and fanotify, zswap's cursor, events of cgroup v1, and user pages "
        "(up to 7.0)"
    ),
    sources=(
        "memcg",
        "id",
        "child",
        "css_set",
        "stock",
        "sock",
        "lru",
        "writeback",
        "mm",
        "notify",
        "zswap",
        "event",
        "released",
        "closing",
    ),
    places=("refcnt",),
    rows=css_ref_rows,
    explain=lambda snapshot, row: (
        in_flight(held_on_stack(snapshot, row, _most)) or being_split(snapshot, row)
    ),
    above="unknown-references",
    below="missing-references",
    sentence=_sentence,
)
