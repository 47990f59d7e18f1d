# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``percpu`` must name."""

from __future__ import annotations

from memcg_inspect.linux.mm.percpu import PercpuReader
from support.counter_planter import counter
from support.planting import Fault, Planter, Subject


def owner(subject: Subject, _: int) -> Fault:
    """Charge an allocation to another memcg."""
    reader = PercpuReader(subject.image)
    path, _nid = subject.largest("percpu", "data")
    allocs = (a for chunk in reader.chunks() for a in reader.charged(chunk))
    alloc = next(a for a in allocs if subject.path(a.objcg) == path)
    thief = subject.other(path)
    size = reader.charge(alloc)
    return Fault(
        (subject.put(alloc.element, subject.objcg(thief)),),
        (path, thief),
        {(path, None, "MEMCG_PERCPU_B", size), (thief, None, "MEMCG_PERCPU_B", -size)},
    )


PLANTERS = (
    counter("percpu", "data", ("MEMCG_PERCPU_B",), (96, -1, 1_000_003)),
    Planter("owner of an allocation", owner),
)
