# SPDX-License-Identifier: LGPL-2.1-or-later
"""Read the zones of all nodes, and add up the pages that they count."""

from __future__ import annotations

from collections import Counter

from memcg_inspect.collect.partial import Partial
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.internal import zone_uses
from memcg_inspect.linux.mm.mm_types import LruFlags
from memcg_inspect.linux.mm.mmzone import zone_types
from memcg_inspect.linux.mm.show_mem import read_zones
from memcg_inspect.linux.mm.vmstat import read_zone_totals
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import Zones

__all__ = ("read_zone_counters",)


def read_zone_counters(image: Image, total: Partial, coverage: Coverage) -> Zones:
    """
    Return the zones, and the pages that they count.

    :param total: what the pass over all page frames found
    :param coverage: counts what was read
    """
    listed: Counter[tuple[int, int, str]] = Counter()
    for (_, nid, zone, flags), pages in total.lru.items():
        listed[nid, zone, _list_of(flags)] += pages
    totals, sums = read_zone_totals(image, coverage)
    return Zones(
        zones=read_zones(image, coverage),
        names=zone_types(image),
        totals=totals,
        sums=sums,
        free=total.zone_free,
        pages=total.zone_pages,
        marks=zone_uses(image),
        listed=listed,
        has_generations=any(flags.generation for _, _, _, flags in total.lru),
    )


def _list_of(flags: LruFlags) -> str:
    """Return the enumerator of ``enum zone_stat_item`` that counts the folios of a list."""
    if flags.unevictable:
        return "NR_ZONE_UNEVICTABLE"
    kind = "ANON" if flags.swapbacked else "FILE"
    # Folios of the multi-gen LRU have no such flag: only the lruvec knows which generations are
    # active.
    return f"NR_ZONE_{'ACTIVE' if flags.active else 'INACTIVE'}_{kind}"
