# SPDX-License-Identifier: LGPL-2.1-or-later
"""Zones of an image, and what the guest itself says of them."""

from __future__ import annotations

import re

from drgn import Object
from drgn.helpers.linux.mmzone import NODE_DATA

from memcg_inspect.model_pages import Zone
from support.guests import GuestImage
from support.planting import Fault, NoVictim, Subject

__all__ = ("buddyinfo", "object_of", "order_in_use", "wrong", "zone_in_use", "zoneinfo")

Place = tuple[int, str]


def zone_in_use(subject: Subject, blocks: int = 0) -> Zone:
    """
    Return the largest zone of the last node, or the largest of all.

    :param blocks: the least number of free blocks of an order
    """
    zones = [z for z in subject.snapshot.zones.zones.values() if max(z.free_blocks) >= blocks]
    found = max(zones, key=lambda zone: (zone.managed > 1 << 13, zone.nid), default=None)
    if found is None:
        raise NoVictim(f"no zone has {blocks} free blocks of an order")
    return found


def order_in_use(zone: Zone, blocks: int) -> int:
    """Return the smallest order of which a zone has so many free blocks."""
    return next(order for order, number in enumerate(zone.free_blocks) if number >= blocks)


def object_of(subject: Subject, zone: Zone) -> Object:
    """Return the ``struct zone``."""
    return NODE_DATA(subject.prog, zone.nid).node_zones[zone.number]


def wrong(subject: Subject, item: str, size: int) -> Fault:
    """Change a counter of a zone."""
    zone = zone_in_use(subject)
    name = f"{item}[{subject.snapshot.zones.name(zone.number)}]"
    write = subject.add(object_of(subject, zone).vm_stat[subject.prog[item]], size)
    return Fault((write,), (), {("?", zone.nid, name, size)})


def zoneinfo(image: GuestImage, which: str) -> dict[Place, dict[str, int]]:
    """Return the counters of zones in /proc/zoneinfo by node and name of the zone."""
    text = (image.guest / which / "proc/zoneinfo").read_text()
    found: dict[Place, dict[str, int]] = {}
    for part in re.split(r"^(?=Node )", text, flags=re.M)[1:]:
        place = re.match(r"Node (\d+), zone +(\w+)", part)
        assert place is not None
        counters = re.findall(r"^ +(nr_\w+) +(\d+)$", part, re.M)
        found[int(place[1]), place[2]] = {n: int(v) for n, v in counters}
    return found


def buddyinfo(image: GuestImage, which: str) -> dict[Place, list[int]]:
    """Return the number of free blocks by order in /proc/buddyinfo, by the same."""
    text = (image.guest / which / "proc/buddyinfo").read_text()
    found = re.findall(r"^Node (\d+), zone +(\w+) +(.*)$", text, re.M)
    return {(int(node), zone): list(map(int, counts.split())) for node, zone, counts in found}
