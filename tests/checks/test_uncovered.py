# SPDX-License-Identifier: LGPL-2.1-or-later
"""The counters that no identity covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made import RECLAIMABLE, UNRECLAIMABLE, features, snapshot

from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.uncovered import not_covered
from memcg_inspect.model import NodeStat
from memcg_inspect.model_pages import Zones

LRUVEC = ("NR_INACTIVE_ANON", RECLAIMABLE, UNRECLAIMABLE, "NR_PAGETABLE", "NR_SECONDARY_PAGETABLE")


def made(node_items: tuple[str, ...] = ("NR_DIRTIED", "NR_IOMMU_PAGES")) -> Snapshot:
    kernel = features(*LRUVEC, "MEMCG_SOCK")
    return snapshot(
        features=replace(
            kernel,
            memcg_items=("MEMCG_SOCK", "MEMCG_NEW"),
            lruvec_items=LRUVEC,
            node_items=(*LRUVEC, *node_items),
            page_counters=("memory", "new"),
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


LEVELS = (
    "the values for memcgs, for their nodes and for whole nodes are compared with each other, but "
    "not with pages"
)
NODE_ONLY = (
    "kept for whole nodes only; their sum is compared with the total of all nodes, but not with "
    "memory"
)
NOT_NODES = "compared for memcgs, but not for whole nodes: what is not charged is not found"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("NR_GPU_ACTIVE", "the pages of GPU drivers are not walked"),
        ("NR_GPU_RECLAIM", "the pages of GPU drivers are not walked"),
        ("NR_KERNEL_SCS_KB", "shadow call stacks are not walked"),
    ],
)
def test_counters_of_memory_whose_owners_are_not_found(item: str, reason: str) -> None:
    assert dict(not_covered(made(node_items=(item,))))[item] == f"{reason}; {NODE_ONLY}"


def test_counters_and_reasons_in_their_order() -> None:
    assert not_covered(made()) == (
        ("MEMCG_NEW", "no identity compares this counter"),
        ("NR_INACTIVE_ANON", LEVELS),
        (
            "NR_SECONDARY_PAGETABLE",
            "the page tables of KVM and of IOMMU drivers are not walked; the values for memcgs and "
            "for their nodes are compared with each other; that for a whole node also counts what "
            "is not charged, and must be at least as large",
        ),
        ("new.usage", "no identity compares this page counter"),
        ("memcg_vm_event_stat", "events leave nothing in memory to compare"),
        ("NR_DIRTIED", NODE_ONLY),
        (
            "NR_IOMMU_PAGES",
            f"the page tables of IOMMU drivers are not walked; {NODE_ONLY}",
        ),
    )


def test_a_kernel_that_does_not_mark_large_kmallocs() -> None:
    """Nor charge them all. So the counter of the node is not compared, that of memcgs is."""
    taken = made()
    unmarked = replace(taken, features=replace(taken.features, large_kmalloc_type=False))
    more = set(not_covered(unmarked)) - set(not_covered(taken))
    assert more == {(UNRECLAIMABLE, NOT_NODES)}


def test_without_counters_of_memcgs_there_are_no_events() -> None:
    taken = made()
    none = replace(taken, features=replace(taken.features, memcg_items=()))
    assert "memcg_vm_event_stat" not in dict(not_covered(none))


@pytest.mark.parametrize(
    ("identity", "items"),
    [
        ("node_stack", {"NR_KERNEL_STACK_KB"}),
        ("node_pagetable", {"NR_PAGETABLE"}),
        ("node_vmalloc", {"NR_VMALLOC"}),
        ("node_slab", {RECLAIMABLE, UNRECLAIMABLE}),
        ("slab", set()),
    ],
)
def test_counters_of_nodes_that_an_identity_covers(identity: str, items: set[str]) -> None:
    [check] = [check for check in CHECKS if check.name == identity]
    assert set(check.node_items(made())) == items


def test_a_counter_of_an_identity_that_is_not_kept_is_listed() -> None:
    """Such as that of zswap, on a kernel without it: then there is nothing to compare."""
    taken = made()
    without = replace(taken, features=replace(taken.features, items=frozenset({RECLAIMABLE})))
    assert "NR_PAGETABLE" in dict(not_covered(without))


def test_counters_of_zones_that_are_compared_with_each_other_only() -> None:
    """Free pages are compared with memory."""
    zones = Zones(totals={"NR_BOUNCE": 3, "NR_FREE_PAGES": 5}, sums={"NR_BOUNCE": 3})
    reasons = dict(not_covered(replace(made(), zones=zones)))
    assert reasons["NR_BOUNCE"] == (
        "kept for zones; their sum is compared with the total of all zones, but not with memory"
    )
    assert "NR_FREE_PAGES" not in reasons
