# SPDX-License-Identifier: LGPL-2.1-or-later
"""Small snapshots made by hand, for tests of pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memcg_inspect.checks.counters import Counters
from memcg_inspect.checks.identities.css_refs import css_references
from memcg_inspect.checks.ledger import Entry, Ledger
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import (
    Accounting,
    Coverage,
    CssRefs,
    ImageInfo,
    Memcg,
    Objcg,
    Stat,
)
from memcg_inspect.model_kernel import Features, Limits

RECLAIMABLE = "NR_SLAB_RECLAIMABLE_B"
UNRECLAIMABLE = "NR_SLAB_UNRECLAIMABLE_B"

#: Memcgs and objcgs of :func:`family`.
ROOT, A, B, DEAD = 0x1000, 0x2000, 0x3000, 0x4000
OBJCG_A, OBJCG_B, OBJCG_DEAD = 0xA0, 0xB0, 0xD0


def tree(*memcgs: Memcg) -> dict[int, Memcg]:
    """Return memcgs by address."""
    return {memcg.address: memcg for memcg in memcgs}


def family() -> dict[int, Memcg]:
    """Return ``/``, its child ``/a``, and below that ``/a/b`` and the removed ``/a/dead``."""
    return tree(
        Memcg(ROOT, "/", 1, "online", None, ROOT),
        Memcg(A, "/a", 2, "online", ROOT, A),
        Memcg(B, "/a/b", 3, "online", A, B),
        Memcg(DEAD, "/a/dead", 4, "dying", A, A),
    )


def family_objcgs() -> dict[int, Objcg]:
    """Return one objcg for each; that of the removed memcg was reparented to ``/a``."""
    return {
        OBJCG_A: Objcg(OBJCG_A, A, 0, False, 0),
        OBJCG_B: Objcg(OBJCG_B, B, 0, False, 0),
        OBJCG_DEAD: Objcg(OBJCG_DEAD, A, 0, False, 0),
    }


def zero(memcgs: Iterable[int], nodes: Sequence[int]) -> dict[tuple[int, int], dict[str, Stat]]:
    """Return lruvec counters that are all 0."""
    return {
        (memcg, nid): {RECLAIMABLE: Stat(0, 0, 0), UNRECLAIMABLE: Stat(0, 0, 0)}
        for memcg in memcgs
        for nid in nodes
    }


def ledger(charges: Mapping[tuple[int, Any, str, int], tuple[int, int]]) -> Ledger:
    """Return a ledger of (payer, kind, detail, nid) -> (bytes, charges)."""
    made = Ledger()
    for key, (size, count) in charges.items():
        made.add(Entry(*key), size, count)
    return made


def features(*items: str, **other: bool) -> Features:
    """Return a kernel that keeps these counters, and those of slabs, on cgroup v2."""
    flags = {
        "lru_holds_objcg": True,
        "lru_charged_to_own_node": True,
        "default_hierarchy": True,
        "caches_objcg": True,
        "large_kmalloc_type": True,
        "zswap": True,
        **other,
    }
    return Features(items=frozenset({RECLAIMABLE, UNRECLAIMABLE, *items}), **flags)


#: Of a kernel with 4 KiB pages, two CPUs, and objects of at most two pages.
LIMITS = Limits(
    charge_batch=64,
    folio_batch=31,
    block=1024,
    stack=16 << 10,
    slab_object=8200,
    slab_stock=0x7FFF,
    percpu=(32 << 10) * (2 + 2),
)


def snapshot(
    *,
    memcgs: Mapping[int, Memcg] | None = None,
    objcgs: Mapping[int, Objcg] | None = None,
    charges: Ledger | None = None,
    memcg_stats: Mapping[int, Mapping[str, Stat]] | None = None,
    lruvec_stats: Mapping[tuple[int, int], Mapping[str, Stat]] | None = None,
    nodes: tuple[int, ...] = (0, 1),
    coverage: Mapping[str, Coverage] | None = None,
    accounting: Accounting = "objcg-per-node",
    **more: Any,
) -> Snapshot:
    """Return a snapshot, of :func:`family` if *memcgs* is ``None``."""
    memcgs = family() if memcgs is None else memcgs
    lruvec_stats = zero(memcgs, nodes) if lruvec_stats is None else lruvec_stats
    more.setdefault("features", features())
    made = Snapshot(
        image=ImageInfo("7.3.0", "vmcore", nodes, 2, 4096, accounting),
        memcgs=memcgs,
        objcgs=family_objcgs() if objcgs is None else objcgs,
        ledger=Ledger() if charges is None else charges,
        counters=Counters(memcgs, memcg_stats or {}, lruvec_stats),
        limits=LIMITS,
        coverage=coverage or {},
        **more,
    )
    return made if made.css else replace(made, css=_css(made))


def _css(made: Snapshot) -> dict[int, CssRefs]:
    """Return as many references to each memcg as its holders have."""
    bare = {
        memcg.address: CssRefs(0, 0, int(not memcg.offline), not memcg.offline, 1 - memcg.offline)
        for memcg in made.memcgs.values()
        if memcg.parent is not None
    }
    found = css_references(replace(made, css=bare))
    return {
        address: css._replace(refs=sum(found[address].values())) for address, css in bare.items()
    }
