# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Suspects
--------

A finding about an amount does not say which charge is wrong. A :class:`Suspect` describes the
charges that may be, and ranks those that are found. ``memcg_inspect.collect.evidence`` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from memcg_inspect.checks.ledger import ChargeKind

__all__ = ("MOST_EVIDENCE", "Suspect", "most_likely")

#: Pieces of evidence listed with one finding.
MOST_EVIDENCE = 10

T = TypeVar("T")


class Suspect(NamedTuple):
    """
    Which charges to list as evidence.

    :ivar payers: the obj_cgroups they are charged to, ``struct obj_cgroup *``
    :ivar detail: part of the kind; ``None`` for any
    :ivar nid: backing node; ``None`` for any
    :ivar divides: bytes that a number of equal charges must add up to; 0 for any
    :ivar neighbours: ``struct obj_cgroup *``. Charges in slabs that hold many of theirs come first.
    """

    kind: ChargeKind
    payers: frozenset[int]
    detail: str | None = None
    nid: int | None = None
    divides: int = 0
    neighbours: frozenset[int] = frozenset()

    def fits(self, size: int, detail: str | None = None, nid: int | None = None) -> bool:
        """
        Return whether charges like this may be the cause, whoever pays for them.

        :param size: bytes of one charge
        :param detail: part of the kind; ``None`` if it does not matter
        :param nid: backing node; ``None`` if there is no single one
        """
        return (
            size > 0
            and self.divides % size == 0
            and (None in (self.detail, detail) or self.detail == detail)
            and (None in (self.nid, nid) or self.nid == nid)
        )

    def rank(self, size: int, neighbours: int = 0) -> int:
        """
        Return how likely a charge is the cause; more is likelier.

        :param size: bytes of the charge. A single one is likelier than a number of smaller ones.
        :param neighbours: charges of :attr:`neighbours` in the same slab
        """
        return 2 * neighbours + (size == self.divides)


def most_likely(ranked: Iterable[tuple[int, T]]) -> list[tuple[int, T]]:
    """Return the likeliest pieces of evidence, best first, of pairs of rank and evidence."""
    return sorted(ranked, key=lambda pair: -pair[0])[:MOST_EVIDENCE]
