# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``zswap`` must name."""

from __future__ import annotations

from memcg_inspect.linux.mm.zswap import ZswapReader
from support.counter_planter import counter
from support.planting import Fault, NoVictim, Planter, Subject


def length(subject: Subject, size: int) -> Fault:
    """Shorten an entry: less was found than its memcg is charged for."""
    victims = set(subject.victims())
    for entry in ZswapReader(subject.image).entries():
        if size + 100 < entry.length < 3_000 and subject.path(entry.objcg) in victims:
            path = subject.path(entry.objcg)
            write = subject.add(subject.object("struct zswap_entry *", entry.address).length, -size)
            return Fault((write,), (path,), {(path, None, "MEMCG_ZSWAP_B", size)})
    raise NoVictim("no entry in zswap is long enough")


PLANTERS = (
    counter("zswap", None, ("MEMCG_ZSWAPPED",), (7, -1, 5_000)),
    counter("zswap", None, ("MEMCG_ZSWAP_B",), (1, -4_096, 1_000_003)),
    Planter("length of an entry", length, (8, 1)),
)
