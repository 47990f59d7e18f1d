# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``swap`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject

ITEM = "MEMCG_SWAP"


def counter(subject: Subject, size: int) -> Fault:
    """Change the counter of the victim with most swap entries."""
    entries = subject.snapshot.swap_entries
    path = max(subject.victims(), key=lambda path: entries[subject.paths[path]])
    write = subject.add(subject.percpu_counter(path, ITEM), size)
    return Fault((write,), (path,), {(path, None, ITEM, size)})


PLANTERS = (Planter("a CPU's part of MEMCG_SWAP", counter, (1, -3, 4_000)),)
