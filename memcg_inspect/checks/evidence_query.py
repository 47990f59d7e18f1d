# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Queries for evidence
--------------------

A finding about an amount does not say which charge is wrong. An :class:`EvidenceQuery` describes
the charges that may be wrong, and ranks those that are found. ``memcg_inspect.collect.evidence``
searches for them, and keeps the likeliest ones as :class:`Candidates`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.report import Evidence

__all__ = ("MOST_EVIDENCE", "Candidates", "EvidenceQuery", "Rank")

#: Pieces of evidence listed with one finding.
MOST_EVIDENCE = 10


class Rank(NamedTuple):
    """
    How likely a charge is the cause. The greater one is likelier; the first field counts most.

    :ivar explains: whether this charge alone is the amount
    :ivar neighbours: number of charges to :attr:`EvidenceQuery.neighbours` in the same slab
    :ivar alone: whether the other charges in its slab, at least one, are of other payers
    """

    explains: bool
    neighbours: int = 0
    alone: bool = False


class EvidenceQuery(NamedTuple):
    """
    Which charges to list as evidence.

    :ivar kind: kind of the charges
    :ivar payers: the obj_cgroups that they are charged to, ``struct obj_cgroup *``
    :ivar detail: part of the kind; ``None`` for any
    :ivar nid: backing node; ``None`` for any
    :ivar amount: bytes that one charge, or several of one size, make up; 0 for any
    :ivar modulo: *amount* is known modulo this many bytes; 0 if it is known
    :ivar neighbours: ``struct obj_cgroup *``. Charges in slabs with many objects of these are
        likelier.
    """

    kind: ChargeKind
    payers: frozenset[int]
    detail: str | None = None
    nid: int | None = None
    amount: int = 0
    modulo: int = 0
    neighbours: frozenset[int] = frozenset()

    def explains(self, size: int) -> bool:
        """Return whether one charge of this many bytes is the amount."""
        if self.modulo:
            return size % self.modulo == self.amount % self.modulo
        return size == self.amount

    def fits(self, size: int, detail: str | None = None, nid: int | None = None) -> bool:
        """
        Return whether charges of this size, detail and node may be the cause, for any payer.

        :param size: bytes of one charge
        :param detail: part of the kind; ``None`` if it does not matter
        :param nid: backing node; ``None`` if there is no single one
        """
        return (
            size > 0
            and (self.amount % size == 0 or self.explains(size))
            and (None in (self.detail, detail) or self.detail == detail)
            and (None in (self.nid, nid) or self.nid == nid)
        )

    def in_slab(self, charged: Mapping[int, int], size: int) -> tuple[Rank, int]:
        """
        Return how likely the objects of the payers in a slab are the cause, and how many they are.

        :param charged: number of charged objects in the slab by ``struct obj_cgroup *``
        :param size: bytes of one charge
        """
        number = sum(n for objcg, n in charged.items() if objcg in self.payers)
        neighbours = sum(n for objcg, n in charged.items() if objcg in self.neighbours)
        alone = number == 1 and sum(charged.values()) > 1
        return Rank(self.explains(size), neighbours, alone), number


class Candidates:
    """
    The likeliest of the charges that a query describes, and how many there are.

    Charges that are equally likely are listed in the order in which they are added.

    :ivar numbers: number of charges by rank
    :ivar sizes: number of charges by kind, bytes of one charge and ``struct obj_cgroup *``
    :ivar likeliest: those that are listed, with their ranks
    """

    def __init__(self) -> None:
        self.numbers: Counter[Rank] = Counter()
        self.sizes: Counter[tuple[str, int, int]] = Counter()
        self.likeliest: list[tuple[Rank, Evidence]] = []

    def add(self, rank: Rank, evidence: Iterable[Evidence], number: int = 1) -> None:
        """
        Add charges of one rank.

        :param evidence: the charges. They are read only if they are listed.
        :param number: how many they are
        """
        self.numbers[rank] += number
        likeliest = self.likeliest
        if len(likeliest) == MOST_EVIDENCE and rank <= likeliest[-1][0]:
            return
        likeliest += ((rank, charge) for charge in islice(evidence, MOST_EVIDENCE))
        likeliest.sort(key=lambda pair: pair[0], reverse=True)  # stable
        del likeliest[MOST_EVIDENCE:]

    def merge(self, other: Candidates) -> None:
        """Add those of another query."""
        self.sizes.update(other.sizes)
        for rank, number in other.numbers.items():
            self.add(rank, [charge for r, charge in other.likeliest if r == rank], number)

    @property
    def total(self) -> int:
        """Number of all charges, also of those that are not listed."""
        return self.numbers.total()

    @property
    def tied(self) -> int:
        """Number of charges that are not listed, and as likely as the last one that is."""
        if not self.likeliest:
            return 0
        last = self.likeliest[-1][0]
        return self.numbers[last] - sum(rank == last for rank, _ in self.likeliest)

    @property
    def listed(self) -> tuple[Evidence, ...]:
        """The likeliest charges, with their ranks: 1 and more than the number of likelier ones."""
        return tuple(replace(charge, rank=self._place(rank)) for rank, charge in self.likeliest)

    def _place(self, rank: Rank) -> int:
        return 1 + sum(number for other, number in self.numbers.items() if other > rank)
