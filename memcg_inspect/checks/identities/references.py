# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``references``
-----------------------

For each obj_cgroup: its reference count is the number of references that were found. A higher count
means a leak, or a holder that this program does not know.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from memcg_inspect.checks.check import Check, Explained, references_differ
from memcg_inspect.checks.half_done import (
    CGROUP,
    LRU,
    OBJCG,
    PAGES,
    STACK,
    VMALLOC,
    HalfDone,
    pattern,
)
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.rows import RowKey, doubt_released, doubted, make_row, missing_if
from memcg_inspect.checks.snapshot import OBJECTS, Snapshot
from memcg_inspect.checks.split import being_split
from memcg_inspect.checks.zswap_stores import being_stored
from memcg_inspect.model import counted, first_of
from memcg_inspect.report import Row

__all__ = ("CHECK", "reference_rows")

_KINDS: tuple[ChargeKind, ...] = ("kmem", "lru", *OBJECTS)
#: Holders of references that are not charges, by subject of the coverage.
_HOLDERS = {"stock": "object stocks", "tasks": "tasks", "bpf": "BPF maps"}

_MEMCGS = "memcgs, which hold references to their obj_cgroups, are not all in the image"


def reference_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the reference count of each obj_cgroup with the references found."""
    found = _found(snapshot)
    why = _why_missing(snapshot)
    unsure = snapshot.unreadable | snapshot.counters.partial
    unknown = _unknown_holders(snapshot)
    rows = []
    for address, objcg in snapshot.objcgs.items():
        if objcg.is_root:
            continue  # the references to obj_cgroups of the root are not counted
        payer = snapshot.payer(address)
        row = make_row(
            RowKey("references", "refcnt", "references", payer, objcg.nid, address),
            {"memcg": objcg.memcg_refs, **found[address]},
            None if objcg.refs is None else {"refcnt": objcg.refs},
            missing_if(_MEMCGS if why is None and payer in unsure else why),
        )
        row = doubted(row, missing_if(unknown.get(payer)))
        rows.append(doubt_released(snapshot, row))
    return rows


def _unknown_holders(snapshot: Snapshot) -> dict[int | None, str]:
    """Return why the obj_cgroups of a memcg may have more references, by memcg."""
    # A task that moves between CPUs uses several obj_cgroups of its memcg.
    return {
        snapshot.payer(objcg): f"{what} may hold references that this program does not find"
        for objcg, what in snapshot.unknown_holders.items()
    }


def _found(snapshot: Snapshot) -> defaultdict[int, Counter[str]]:
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for entry, amount in snapshot.ledger:
        if entry.kind != "lru" or snapshot.features.lru_holds_objcg:
            found[entry.payer][entry.kind] += amount.charges
    for holder, references in snapshot.references.items():
        for address, number in references.items():
            found[address][holder] += number
    for stock in snapshot.stocks:
        found[stock.objcg]["stock"] += 1
    return found


def _why_missing(snapshot: Snapshot) -> str | None:
    for kind in _KINDS:
        if snapshot.ledger.may_miss(kind):
            return f"{kind} memory is not all in the image"
    for subject, holders in _HOLDERS.items():
        if not snapshot.complete(subject):
            return f"{holders} are not all in the image"
    return None


def _being_freed(snapshot: Snapshot, row: Row) -> Explained | None:
    """Return which objects that are being freed hold the references that were not found."""
    transients = snapshot.transients.get(row.objcg or 0, ())
    difference = row.off
    waiting = [transient for transient in transients if transient.freed_by is not None]
    held = sum(transient.references for transient in waiting)
    unsure = [t for t in transients if t.unsure and t.freed_by is None]
    most = held + sum(transient.references for transient in unsure)
    if difference <= 0 or not most:
        return None
    if not unsure or difference <= held:
        what = first_of(sorted({f"{t.what} ({t.address:#x}): {t.freed_by}" for t in waiting}))
        amount = counted(held, "references")
        reason = f"objects being created or freed hold at most {amount}: {what}"
        if difference <= held:
            return Explained("in-flight", reason)
    else:
        what = first_of(sorted({f"{t.what} ({t.address:#x})" for t in unsure}))
        reason = f"objects hold references, and what was not found may free them: {what}"
    return Explained("unverifiable", reason, max(difference - most, 0))


def _sentence(row: Row) -> str:
    return references_differ(
        row,
        f"the refcount of obj_cgroup {row.objcg:#x}",
        "a leak, or an unknown holder",
        "something uses it without a reference",
    )


CHECK = Check(
    name="references",
    counter="the reference count of each `obj_cgroup`",
    unit="references",
    found=(
        "objects, percpu allocations, pages, zswap entries, stocks, tasks, BPF maps, and the "
        "memcg itself"
    ),
    sources=("memcg", "slab", "percpu", "kmem", "zswap", "lru", "stock", "task", "bpf"),
    places=("refcnt",),
    rows=reference_rows,
    by_node_rule=True,
    half_done=HalfDone(
        pattern(OBJCG, PAGES, STACK, VMALLOC, LRU, CGROUP),
        lambda snapshot: snapshot.limits.folio_batch + 1,
        kinds=("object", "cache", "percpu", "kmem", "folio", "batch"),
        unpaid=True,
    ),
    explain=lambda snapshot, row: (
        _being_freed(snapshot, row) or being_split(snapshot, row) or being_stored(snapshot, row)
    ),
    above="unknown-references",
    below="missing-references",
    sentence=_sentence,
)
