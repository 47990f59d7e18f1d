# SPDX-License-Identifier: LGPL-2.1-or-later
"""All identities, in the order of the report."""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.identities import (
    active_memcg,
    alloc_tags,
    cached_stacks,
    css_refs,
    hierarchy,
    hugetlb_nodes,
    hugetlb_usage,
    id_refs,
    kernel_stack,
    kmem,
    kmem_usage,
    levels,
    local,
    local_fold,
    lru,
    node_levels,
    node_pagetable,
    node_slab,
    node_stack,
    node_totals,
    node_vmalloc,
    objcg_bytes,
    objcg_lists,
    objcg_sets,
    page_levels,
    pagetable,
    percpu,
    placement,
    references,
    released,
    reparenting,
    slab,
    sock,
    sock_bytes,
    swap,
    swap_usage,
    task_objcg,
    tcpmem,
    updated,
    usage,
    user_pages,
    vmalloc,
    zone_free,
    zone_free_area,
    zone_lru,
    zone_mlock,
    zone_totals,
    zone_zspages,
    zswap,
)
from memcg_inspect.report import Row

__all__ = ("CHECKS", "check_of", "check_of_item", "items_read")

#: Every identity. One that makes its rows from those of others comes after them.
CHECKS: tuple[Check, ...] = (
    slab.CHECK,
    percpu.CHECK,
    kernel_stack.CHECK,
    pagetable.CHECK,
    vmalloc.CHECK,
    kmem.CHECK,
    objcg_bytes.CHECK,
    zswap.CHECK,
    sock.CHECK,
    sock_bytes.CHECK,
    usage.CHECK,
    swap.CHECK,
    swap_usage.CHECK,
    kmem_usage.CHECK,
    tcpmem.CHECK,
    lru.CHECK,
    user_pages.CHECK,
    hugetlb_usage.CHECK,
    hugetlb_nodes.CHECK,
    levels.CHECK,
    page_levels.CHECK,
    local.CHECK,
    local_fold.CHECK,
    updated.CHECK,
    references.CHECK,
    css_refs.CHECK,
    id_refs.CHECK,
    released.CHECK,
    objcg_sets.CHECK,
    node_slab.CHECK,
    node_stack.CHECK,
    node_pagetable.CHECK,
    node_vmalloc.CHECK,
    node_levels.CHECK,
    node_totals.CHECK,
    zone_free.CHECK,
    zone_free_area.CHECK,
    zone_zspages.CHECK,
    zone_mlock.CHECK,
    zone_lru.CHECK,
    zone_totals.CHECK,
    placement.CHECK,
    reparenting.CHECK,
    objcg_lists.CHECK,
    task_objcg.CHECK,
    active_memcg.CHECK,
    cached_stacks.CHECK,
    alloc_tags.CHECK,
    hierarchy.CHECK,
)

_BY_NAME = {check.name: check for check in CHECKS}


def check_of(row: Row) -> Check:
    """Return the definition of the identity of a row."""
    return _BY_NAME[row.identity]


def check_of_item(item: str) -> Check | None:
    """Return the first identity that compares a counter; ``None`` if none does."""
    return next((check for check in CHECKS if item in check.items), None)


def items_read() -> tuple[str, ...]:
    """Return the enumerators of all counters that identities read."""
    return tuple(dict.fromkeys(item for check in CHECKS for item in check.items))
