# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``hierarchy`` must name."""

from __future__ import annotations

from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from support.planting import Fault, Planter, Subject

ITEM = "NR_SLAB_RECLAIMABLE_B"


def folded(subject: Subject, size: int) -> Fault:
    """Change a parent's own folded counter. Its row tells that from a child's."""
    path, nid = subject.largest("slab", "reclaimable")
    above = path.rpartition("/")[0] or "/"
    stats = subject.memcg(above).nodeinfo[nid].lruvec_stats
    counter = stats.state[StatReader(subject.image, [ITEM]).slots[ITEM]]
    return Fault((subject.add(counter, size),), (above,), {(above, nid, ITEM, size)})


PLANTERS = (Planter("the folded counter of a parent", folded, (96, 1, -8, 1_000_003)),)
