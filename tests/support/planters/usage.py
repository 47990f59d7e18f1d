# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``usage`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject


def page_counter(subject: Subject, size: int) -> Fault:
    """Change the page counter of a memcg. The counter of its parent includes it."""
    path, _ = subject.largest("lru")
    above = path.rpartition("/")[0]
    named = {(path, None, "memory.usage", size)}
    if above:
        # That of the root is not compared: nothing is charged to it.
        named.add((above, None, "memory.usage", -size))
    return Fault((subject.add(subject.memcg(path).memory.usage, size),), (path,), named)


PLANTERS = (Planter("the page counter", page_counter, (3, 1, -64, 60_000)),)
