# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Queries for evidence
--------------------

A finding about an amount does not say which charge is wrong. An :class:`EvidenceQuery` describes
the charges that may be wrong, and ranks those that are found. ``memcg_inspect.collect.evidence``
searches for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from memcg_inspect.checks.ledger import ChargeKind

__all__ = ("MOST_EVIDENCE", "EvidenceQuery", "most_likely")

#: Pieces of evidence listed with one finding.
MOST_EVIDENCE = 10

T = TypeVar("T")


class EvidenceQuery(NamedTuple):
    """
    Which charges to list as evidence.

    :ivar kind: kind of the charges
    :ivar payers: the obj_cgroups that they are charged to, ``struct obj_cgroup *``
    :ivar detail: part of the kind; ``None`` for any
    :ivar nid: backing node; ``None`` for any
    :ivar divides: bytes that the size of a charge must divide; 0 for any size
    :ivar neighbours: ``struct obj_cgroup *``. Charges in slabs with many objects of these come
        first.
    """

    kind: ChargeKind
    payers: frozenset[int]
    detail: str | None = None
    nid: int | None = None
    divides: int = 0
    neighbours: frozenset[int] = frozenset()

    def fits(self, size: int, detail: str | None = None, nid: int | None = None) -> bool:
        """
        Return whether charges of this size, detail and node may be the cause, for any payer.

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
        Return how likely a charge is the cause. A higher rank is likelier.

        :param size: bytes of the charge. One charge is likelier than several smaller ones.
        :param neighbours: number of charges to :attr:`neighbours` in the same slab
        """
        return 2 * neighbours + (size == self.divides)


def most_likely(ranked: Iterable[tuple[int, T]]) -> list[tuple[int, T]]:
    """Return the pairs of rank and evidence with the highest ranks, highest first."""
    return sorted(ranked, key=lambda pair: -pair[0])[:MOST_EVIDENCE]
