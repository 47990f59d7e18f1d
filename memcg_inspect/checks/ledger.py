# SPDX-License-Identifier: LGPL-2.1-or-later
"""The charges of an image, added up by payer, kind, detail and backing node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ("GONE", "Amount", "ChargeKind", "Entry", "Ledger")

#: Detail of pages of a running kernel that were freed before their use was known.
GONE = "gone"

ChargeKind = Literal["slab", "percpu", "kmem", "zswap", "lru", "sock"]


class Entry(NamedTuple):
    """
    Charges that are added up.

    :ivar payer: ``struct obj_cgroup *``, or ``struct mem_cgroup *`` for charges to the memcg itself
    :ivar detail: part of the kind, e.g. ``reclaimable`` for slab objects
    :ivar nid: backing node: node of the page that holds the charge
    """

    payer: int
    kind: ChargeKind
    detail: str
    nid: int


class Amount(NamedTuple):
    """Bytes, and the number of charges."""

    bytes: int
    charges: int

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return Amount(self.bytes + other.bytes, self.charges + other.charges)


@dataclass
class Ledger:
    """
    All charges that were read.

    :ivar missing: (kind, detail, node) of charges that may be missing; ``None`` for any
    """

    _amounts: dict[Entry, Amount] = field(default_factory=dict)
    missing: set[tuple[ChargeKind, str | None, int | None]] = field(default_factory=set)

    def add(self, entry: Entry, size: int, count: int) -> None:
        """
        Add charges.

        :param size: bytes of all of them
        :param count: number of charges
        """
        before = self._amounts.get(entry, Amount(0, 0))
        self._amounts[entry] = before.plus(Amount(size, count))

    def note_missing(
        self, kind: ChargeKind, detail: str | None = None, nid: int | None = None
    ) -> None:
        """
        Note that charges of a kind may be missing.

        :param detail: ``None`` for any
        :param nid: backing node; ``None`` for any
        """
        self.missing.add((kind, detail, nid))

    def note_missing_pages(self, nid: int | None = None, kind: ChargeKind | None = None) -> None:
        """
        Note that pages may be missing.

        :param nid: their node; ``None`` for any
        :param kind: what charges them; ``None`` if that is not known. A page that is charged as
            kernel memory may be one of a large kmalloc, and a slab one of sockets
        """
        if kind != "lru":
            self.note_missing("slab", None, nid)
        if kind in (None, "kmem"):
            self.note_missing("kmem", None, nid)
        if kind in (None, "lru"):
            self.note_missing("lru", None, nid)
        if kind in (None, "slab"):
            self.note_missing("sock")

    def may_miss(self, kind: ChargeKind, detail: str | None = None, nid: int | None = None) -> bool:
        """
        Return whether charges of a kind may be missing.

        :param detail: ``None`` for any
        :param nid: backing node; ``None`` for any
        """
        return any(
            kind == missing_kind
            and (detail is None or missing_detail is None or detail == missing_detail)
            and (nid is None or missing_nid is None or nid == missing_nid)
            for missing_kind, missing_detail, missing_nid in self.missing
        )

    def merge(self, other: Ledger) -> None:
        """Add the charges of another part of the image, and what may be missing from it."""
        for entry, amount in other:
            self.add(entry, amount.bytes, amount.charges)
        self.missing |= other.missing

    def __iter__(self) -> Iterator[tuple[Entry, Amount]]:
        return iter(self._amounts.items())

    def __len__(self) -> int:
        return len(self._amounts)
