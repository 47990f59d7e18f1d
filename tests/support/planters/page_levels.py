# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``page_levels`` must name."""

from __future__ import annotations

from collections.abc import Callable

from support.planting import Fault, Planter, Subject


def memcg_level(item: str) -> Callable[[Subject, int], Fault]:
    """Return a function that changes the counter of a memcg, and not that of its node."""

    def plant(subject: Subject, size: int) -> Fault:
        path, _ = subject.largest("kmem", "stack")
        write = subject.add(subject.percpu_counter(path, item, cpu=1), size)
        return Fault((write,), (path,), {(path, None, item, size)})

    return plant


def node_level(subject: Subject, size: int) -> Fault:
    """Change the counter of one node of a memcg."""
    path, nid = subject.largest("lru")
    write = subject.add(subject.percpu_counter(path, "NR_FILE_PAGES", nid), size)
    return Fault((write,), (path,), {(path, None, "NR_FILE_PAGES", -size)})


PLANTERS = (
    Planter("stacks of the memcg alone", memcg_level("NR_KERNEL_STACK_KB"), (16, 1, -4, 60_000)),
    Planter("anon pages of the memcg alone", memcg_level("NR_ANON_MAPPED"), (1, 4_000)),
    Planter("the page cache of a node alone", node_level, (1, 4_000)),
)
