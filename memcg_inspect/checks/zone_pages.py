# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rows of pages that zones count
------------------------------

Counters of free pages, and lists of free pages, change under ``zone->lock``. While a CPU holds it,
they may differ. The lock does not tell what the CPU was doing, so such a row is unverifiable, up to
the most that is changed at once. Other counters are kept as those of nodes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from memcg_inspect.checks.check import Explained
from memcg_inspect.checks.half_done import FREE, pattern
from memcg_inspect.checks.rows import RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running
from memcg_inspect.model_pages import Zone, Zones
from memcg_inspect.report import Row

__all__ = (
    "being_changed",
    "counters_of",
    "free_pages",
    "places_of",
    "why_not_all",
    "why_lists_may_change",
    "why_not_known",
    "zone_item",
    "zone_of",
    "zone_row",
)

#: Pages that ``rmqueue_bulk()`` takes off the lists before it counts them (up to 6.9): a batch of
#: at most 64, scaled by ``CONFIG_PCP_BATCH_SCALE_MAX`` of at most 6.
_MOST_AT_ONCE = 64 << 6
_ALLOCATES = pattern(FREE)
#: The least number of frames of a stack that could be unwound.
_UNWOUND = 3
_AND = " + "


def zone_item(zones: Zones, items: Iterable[str], number: int) -> str:
    """Return the name of the row of a zone that compares one counter, or the sum of several."""
    return f"{_AND.join(items)}[{zones.name(number)}]"


def counters_of(item: str) -> tuple[str, ...]:
    """Return the enumerators of ``enum zone_stat_item`` in the name of a row."""
    return tuple(item.partition("[")[0].split(_AND))


def zone_of(zones: Zones, row: Row) -> Zone | None:
    """Return the zone that a row is about."""
    name = row.item.partition("[")[2].partition("]")[0]
    return next(
        (z for z in zones.zones.values() if z.nid == row.nid and zones.name(z.number) == name), None
    )


def places_of(zones: Zones, found: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """
    Return node and number of all zones.

    :param found: those in which pages were found. A zone that could not be read is among them
    """
    return sorted({*zones.zones, *found})


def free_pages(zones: Zones, zone: Zone) -> dict[str, int]:
    """
    Return the pages of a zone that ``NR_FREE_PAGES`` counts, by what they are.

    Pages that are not accepted yet are counted. Before 6.12 they have no mark, and are taken from
    ``NR_UNACCEPTED``, which is changed together with it.
    """
    place = zone.nid, zone.number
    free = sum(n << order for (*at, order), n in zones.free.items() if (*at,) == place)
    unaccepted = zones.pages.get(("unaccepted", *place), 0)
    if "unaccepted" not in zones.marks:
        unaccepted = zone.counter("NR_UNACCEPTED") or 0
    return {"free": free, "isolated": -zone.isolated, "unaccepted": unaccepted}


def zone_row(
    snapshot: Snapshot,
    identity: str,
    items: Iterable[str],
    place: tuple[int, int],
    found: dict[str, int],
) -> Row:
    """
    Compare pages with a counter of a zone, or with the sum of several.

    :param items: enumerators of ``enum zone_stat_item``
    :param place: node and number of the zone
    """
    zones, items = snapshot.zones, tuple(items)
    zone, claimed = zones.zones.get(place), None
    if zone is not None:
        stats = [zone.stats[item] for item in items if item in zone.stats]
        claimed = {
            "vm_stat": sum(stat.folded for stat in stats),
            "cpu": sum(stat.cpus for stat in stats),
        }
    nid, number = place
    return make_row(
        RowKey(identity, zone_item(zones, items, number), "pages", nid=nid),
        found,
        claimed,
        missing_if(why_not_all(snapshot)),
        unread="the zone is not in the image, or has no pages",
    )


def why_not_all(snapshot: Snapshot) -> str | None:
    """Return why pages may be missing from what was found."""
    return None if snapshot.complete("pages") else "struct pages are not in the image"


def why_not_known(*items: str) -> Callable[[Snapshot], str | None]:
    """Return a function that returns why a kernel does not keep an identity of zones."""

    def why(snapshot: Snapshot) -> str | None:
        if not snapshot.zones.totals:
            return "the counters of zones of this kernel are not known"
        if not snapshot.zones.totals.keys() & set(items):
            return f"this kernel does not keep {' or '.join(items)}"
        return None

    return why


def being_changed(snapshot: Snapshot, row: Row) -> Explained | None:
    """Return why free pages that differ are no finding; ``None`` if they are one."""
    zone = zone_of(snapshot.zones, row)
    if zone is None or abs(row.off) > max(2 * snapshot.limits.block, _MOST_AT_ONCE):
        return None
    reason = why_lists_may_change(zone)
    if reason is None or (zone.is_locked is None and not any(_allocating(snapshot.running))):
        return None
    return Explained("unverifiable", reason)


def why_lists_may_change(zone: Zone) -> str | None:
    """Return why the lists of free pages of a zone may differ from its counters."""
    if zone.is_locked is None:
        return "whether a CPU was changing the lists is not known"
    return "a CPU was changing the lists of free pages" if zone.is_locked else None


def _allocating(running: Iterable[Running]) -> Iterator[Running]:
    """Return the CPUs that may be changing the lists of free pages, by their stacks."""
    for cpu in running:
        if cpu.busy and (
            len(cpu.functions) < _UNWOUND or any(map(_ALLOCATES.match, cpu.functions))
        ):
            yield cpu
