# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``levels`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject

ITEM = "NR_SLAB_RECLAIMABLE_B"


def memcg_level(subject: Subject, size: int) -> Fault:
    """Change the counter of a memcg, and not that of its node."""
    path, _ = subject.largest("slab", "reclaimable")
    write = subject.add(subject.percpu_counter(path, ITEM, cpu=1), size)
    return Fault((write,), (path,), {(path, None, ITEM, size)})


PLANTERS = (Planter("the counter of the memcg alone", memcg_level, (-200, 1, 1_000_003)),)
