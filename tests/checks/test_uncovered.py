# SPDX-License-Identifier: LGPL-2.1-or-later
"""The counters that no identity covers."""

from __future__ import annotations

from dataclasses import replace

from support.made import RECLAIMABLE, UNRECLAIMABLE, features, snapshot

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.uncovered import not_covered
from memcg_inspect.model import NodeStat

LRUVEC = ("NR_INACTIVE_ANON", RECLAIMABLE, UNRECLAIMABLE, "NR_PAGETABLE", "NR_SECONDARY_PAGETABLE")


def made(**more: tuple[str, ...]) -> Snapshot:
    kernel = features(*LRUVEC, "MEMCG_SOCK")
    return snapshot(
        features=replace(
            kernel,
            memcg_items=("MEMCG_SOCK", "MEMCG_NEW"),
            lruvec_items=LRUVEC,
            node_items=(*LRUVEC, "NR_DIRTIED", "NR_IOMMU_PAGES"),
            page_counters=("memory", "new"),
            **more,
        ),
        node_stats={(0, RECLAIMABLE): NodeStat(0, 0)},
    )


def test_what_an_identity_compares_with_memory_is_covered() -> None:
    items = [item for item, _ in not_covered(made())]
    assert not {RECLAIMABLE, "NR_PAGETABLE", "MEMCG_SOCK", "memory.usage"} & set(items)
    assert len(items) == len(set(items))


def test_all_others_are_listed_with_a_reason() -> None:
    reasons = dict(not_covered(made()))
    assert {"MEMCG_NEW", "new.usage", "memcg_vm_event_stat", "NR_DIRTIED"} <= reasons.keys()
    assert all(reasons.values())
    # Kept at several levels that are compared with each other.
    assert "with each other" in reasons["NR_INACTIVE_ANON"]
    assert "KVM" in reasons["NR_SECONDARY_PAGETABLE"]
    assert "IOMMU" in reasons["NR_IOMMU_PAGES"]


def test_a_counter_of_an_identity_that_is_not_kept_is_listed() -> None:
    """Such as that of zswap, on a kernel without it: then there is nothing to compare."""
    taken = made()
    without = replace(taken, features=replace(taken.features, items=frozenset({RECLAIMABLE})))
    assert "NR_PAGETABLE" in dict(not_covered(without))
