# SPDX-License-Identifier: LGPL-2.1-or-later
"""What flushes have done with the counters of memcgs, and what they have not done yet."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ("LocalStat", "Unfolded")


class LocalStat(NamedTuple):
    """
    What was folded of one counter, descendants excluded, in the unit of its item.

    :ivar local: ``state_local``
    :ivar flushed: sum of ``state_prev`` over all possible CPUs
    """

    local: int
    flushed: int


class Unfolded(NamedTuple):
    """
    Counters of one memcg that have changes that are not folded yet.

    :ivar changed: names of the counters that each CPU has changed, by CPU; CPUs without changes
        are left out
    :ivar pending: names of the counters with ``state_pending``, which children handed up
    :ivar updated: whether the memcg is on the list of updated ones of each possible CPU; CPUs
        whose lists could not be read are left out
    :ivar complete: whether the counters of the memcg and those of all its nodes could be read
    :ivar unsteady: a node that may have had no memory for a time and on which a CPU has such
        changes, by CPU; ``None`` in place of the CPU for ``state_pending``. These changes are not
        among the others
    """

    changed: Mapping[int, tuple[str, ...]]
    pending: tuple[str, ...]
    updated: Mapping[int, bool]
    complete: bool = True
    unsteady: Mapping[int | None, int] = MappingProxyType({})
