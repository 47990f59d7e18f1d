# SPDX-License-Identifier: LGPL-2.1-or-later
"""All charges of one image, added up by who pays, what for, and which node backs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

__all__ = ("Amount", "ChargeKind", "Entry", "Ledger")

ChargeKind = Literal["slab", "percpu", "kmem", "zswap", "lru", "sock"]


class Entry(NamedTuple):
    """
    What amounts are added up by.

    :ivar payer: address of the obj_cgroup, or of the memcg where it is charged itself
    :ivar detail: which part of the kind, e.g. ``reclaimable`` slab objects
    :ivar nid: backing node
    """

    payer: int
    kind: ChargeKind
    detail: str
    nid: int


class Amount(NamedTuple):
    """Bytes, and how many charges they come from."""

    bytes: int
    charges: int

    def plus(self, other: Amount) -> Amount:
        """Return the sum."""
        return Amount(self.bytes + other.bytes, self.charges + other.charges)


class Ledger:
    """The truth, as far as it could be read."""

    def __init__(self) -> None:
        self._amounts: dict[Entry, Amount] = {}
        self._missing: set[tuple[ChargeKind, str | None, int | None]] = set()

    def add(self, entry: Entry, size: int, count: int) -> None:
        """Add *count* charges of *size* bytes in all."""
        before = self._amounts.get(entry, Amount(0, 0))
        self._amounts[entry] = before.plus(Amount(size, count))

    def note_missing(
        self, kind: ChargeKind, detail: str | None = None, nid: int | None = None
    ) -> None:
        """Note that charges of this kind may be missing; ``None`` stands for any."""
        self._missing.add((kind, detail, nid))

    def may_miss(self, kind: ChargeKind, detail: str | None = None, nid: int | None = None) -> bool:
        """Return whether charges that match may be missing; ``None`` stands for any."""
        return any(
            kind == missing_kind
            and (detail is None or missing_detail is None or detail == missing_detail)
            and (nid is None or missing_nid is None or nid == missing_nid)
            for missing_kind, missing_detail, missing_nid in self._missing
        )

    def __iter__(self) -> Iterator[tuple[Entry, Amount]]:
        return iter(self._amounts.items())

    def __len__(self) -> int:
        return len(self._amounts)
