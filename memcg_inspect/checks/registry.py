# SPDX-License-Identifier: LGPL-2.1-or-later
"""All identities, in the order of the report."""

from __future__ import annotations

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.identities import (
    alloc_tags,
    hierarchy,
    kernel_stack,
    kmem,
    levels,
    lru,
    node_slab,
    objcg_bytes,
    page_levels,
    pagetable,
    percpu,
    placement,
    references,
    reparenting,
    slab,
    sock,
    sock_bytes,
    task_objcg,
    usage,
    vmalloc,
    zswap,
)
from memcg_inspect.report import Row

__all__ = ("CHECKS", "check_of", "items_read")

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
    lru.CHECK,
    levels.CHECK,
    page_levels.CHECK,
    references.CHECK,
    node_slab.CHECK,
    placement.CHECK,
    reparenting.CHECK,
    task_objcg.CHECK,
    alloc_tags.CHECK,
    hierarchy.CHECK,
)

_BY_NAME = {check.name: check for check in CHECKS}


def check_of(row: Row) -> Check:
    """Return the definition of the identity of a row."""
    return _BY_NAME[row.identity]


def items_read() -> tuple[str, ...]:
    """Return the enumerators of all counters that identities read."""
    return tuple(dict.fromkeys(item for check in CHECKS for item in check.items))
