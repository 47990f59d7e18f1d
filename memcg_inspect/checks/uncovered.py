# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters that are not covered
-----------------------------

The counters of this kernel whose value no identity compares with what was found in memory. EXACT
says nothing about them. Some of them are kept for the memcg, for the memcg on each node, and for
the whole node. These values are compared with each other. The same fault in all of them is not
found.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcg_inspect.checks.identities.node_levels import AT_LEAST, EXACT
from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import NotCovered

__all__ = ("not_covered",)

_LEVELS = (
    "the values for memcgs, for their nodes and for whole nodes are compared with each other, but "
    "not with pages"
)
_AT_LEAST = (
    "the values for memcgs and for their nodes are compared with each other; that for a whole node "
    "also counts what is not charged, and must be at least as large"
)
_MEMCG = "no identity compares this counter"
_NOT_NODES = "compared for memcgs, but not for whole nodes: what is not charged is not found"
_NODE_ONLY = (
    "kept for whole nodes only; their sum is compared with the total of all nodes, but not with "
    "memory"
)
_ZONE_ONLY = (
    "kept for zones; their sum is compared with the total of all zones, but not with memory"
)
#: Why the owners of the memory that a counter counts are not found.
_NO_OWNER = {
    "NR_SECONDARY_PAGETABLE": "the page tables of KVM and of IOMMU drivers are not walked",
    "NR_IOMMU_PAGES": "the page tables of IOMMU drivers are not walked",
    "NR_GPU_ACTIVE": "the pages of GPU drivers are not walked",
    "NR_GPU_RECLAIM": "the pages of GPU drivers are not walked",
    "NR_KERNEL_SCS_KB": "shadow call stacks are not walked",
}
#: The table of the events of ``memory.stat``.
_EVENTS = NotCovered("memcg_vm_event_stat", "events leave nothing in memory to compare")


def not_covered(snapshot: Snapshot) -> tuple[NotCovered, ...]:
    """
    Return the counters that no identity of this kernel compares with what was found.

    Counters of memcgs come first, then page counters, events, counters of nodes and of zones.
    """
    return tuple(_all(snapshot))


def _all(snapshot: Snapshot) -> Iterator[NotCovered]:
    features = snapshot.features
    kept = [check for check in CHECKS if check.why_not_kept(snapshot) is None]
    found = {item for check in kept if not check.counters_only for item in check.items}
    by_node = {item for check in kept for item in check.node_items(snapshot)}
    for item in features.memcg_items:
        if item not in found:
            yield NotCovered(item, _MEMCG)
    for item in features.lruvec_items:
        if item not in found:
            yield _because(item, _AT_LEAST if item in AT_LEAST else _LEVELS)
        elif item not in by_node and item not in EXACT:
            yield NotCovered(item, _NOT_NODES)
    counted = {name for check in kept for name in check.page_counters}
    for name in features.page_counters:
        if name not in counted:
            yield NotCovered(f"{name}.usage", "no identity compares this page counter")
    if features.memcg_items:
        yield _EVENTS
    for item in features.node_items:
        if item not in by_node and item not in features.lruvec_items:
            yield _because(item, _NODE_ONLY)
    by_zone = {item for check in kept for item in check.zone_items}
    for item in snapshot.zones.totals:
        if item not in by_zone:
            yield NotCovered(item, _ZONE_ONLY)


def _because(item: str, reason: str) -> NotCovered:
    owner = _NO_OWNER.get(item)
    return NotCovered(item, reason if owner is None else f"{owner}; {reason}")
