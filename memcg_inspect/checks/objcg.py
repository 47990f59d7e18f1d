# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identities of obj_cgroups
-------------------------

``objcg_bytes`` needs no counter: an obj_cgroup is charged in whole pages, so its objects and
what is left over of its pages add up to whole pages.

``references`` holds an obj_cgroup's reference count against the references found; what is
left over is a leak or a holder that is not known here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import OBJECTS, Snapshot
from memcg_inspect.model import Row

__all__ = ("objcg_bytes", "objcg_rows", "reference_rows")

#: What holds references and is no charge, by subject of the coverage.
_HOLDERS = {
    "stock": "object stocks",
    "tasks": "tasks",
    "bpf": "BPF maps",
}


_MEMCGS = "memcgs, which hold references to their obj_cgroups, are not all in the image"


def objcg_bytes(snapshot: Snapshot) -> Mapping[int, dict[str, int]]:
    """Return the bytes charged to each obj_cgroup, by where they are."""
    known = _KNOWN.get(snapshot.ledger)
    if known is not None:
        return known
    found: dict[int, dict[str, int]] = {
        a: dict.fromkeys(OBJECTS, 0) | {"stock": 0, "nr_charged_bytes": o.nr_charged_bytes}
        for a, o in snapshot.objcgs.items()
    }
    for entry, amount in snapshot.ledger:
        if entry.kind in OBJECTS and entry.payer in found:
            found[entry.payer][entry.kind] += amount.bytes
    for stock in snapshot.stocks:
        if stock.objcg in found:
            found[stock.objcg]["stock"] += stock.nr_bytes
    _KNOWN[snapshot.ledger] = found
    return found


# Asked for by several identities of one snapshot.
_KNOWN: WeakKeyDictionary[object, Mapping[int, dict[str, int]]] = WeakKeyDictionary()


def objcg_rows(snapshot: Snapshot) -> list[Row]:
    """Check that the bytes of each obj_cgroup add up to whole pages."""
    missing = _why_missing(snapshot, OBJECTS, ("stock",))
    page = snapshot.image.page_size
    rows = []
    for address, found in objcg_bytes(snapshot).items():
        objcg = snapshot.objcgs[address]
        if objcg.is_root:
            continue  # never charged
        total = sum(found.values())
        rows.append(
            make_row(
                "objcg_bytes",
                memcg=snapshot.payer(address),
                objcg=address,
                nid=objcg.nid,
                item="bytes of whole pages",
                unit="bytes",
                found=found,
                # The nearest whole number of pages: a byte lost or counted twice shows as such.
                claimed={"whole_pages": (total + page // 2) // page * page},
                missing=missing,
                missing_hides_both=True,
            )
        )
    return rows


def reference_rows(snapshot: Snapshot) -> list[Row]:
    """Hold the reference count of each obj_cgroup against the references found."""
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for entry, amount in snapshot.ledger:
        if entry.kind != "lru" or snapshot.features.lru_holds_objcg:
            found[entry.payer][entry.kind] += amount.charges
    for holder, references in snapshot.references.items():
        for address, number in references.items():
            found[address][holder] += number
    for stock in snapshot.stocks:
        found[stock.objcg]["stock"] += 1
    missing = _why_missing(snapshot, ("kmem", "lru", *OBJECTS), _HOLDERS)
    unsure = snapshot.unreadable | snapshot.counters.partial
    return [
        make_row(
            "references",
            memcg=snapshot.payer(address),
            objcg=address,
            nid=objcg.nid,
            item="refcnt",
            unit="references",
            found={"memcg": objcg.memcg_refs, **found[address]},
            claimed=None if objcg.refs is None else {"refcnt": objcg.refs},
            missing=_MEMCGS if missing is None and snapshot.payer(address) in unsure else missing,
        )
        for address, objcg in snapshot.objcgs.items()
        if not objcg.is_root  # they are not counted at all
    ]


def _why_missing(
    snapshot: Snapshot, kinds: Iterable[ChargeKind], holders: Iterable[str]
) -> str | None:
    """Return why charges of these kinds, or what else holds obj_cgroups, may be missing."""
    for kind in kinds:
        if snapshot.ledger.may_miss(kind):
            return f"{kind} memory is not all in the image"
    for subject in holders:
        if not snapshot.complete(subject):
            return f"{_HOLDERS[subject]} are not all in the image"
    return None
