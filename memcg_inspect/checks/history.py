# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rows in several samples
-----------------------

What the samples of a running kernel say of one row: whether it was exact, whether a difference is
proved, and how far both sides changed. :mod:`memcg_inspect.checks.samples` has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.checks.judge import Judgement
from memcg_inspect.checks.rows import RowKey, row_key
from memcg_inspect.report import Moved, Row

__all__ = ("MORE_SAMPLES", "SAMPLES", "History", "histories")

#: Number of samples in which a finding must be the same.
SAMPLES = 6
#: The same, of a row that changed, and of any row if others of its identity changed.
MORE_SAMPLES = 2 * SAMPLES
#: Samples of these that must have read the stacks of tasks that wait. A task may leave the middle
#: of a charge after the charges of a sample are read and before its stack is; hardly twice.
_DECISIVE = 2
#: A difference that is so many times as large as both sides changed is none that the changes make.
_FAR = 64


class History(NamedTuple):
    """
    One row in all samples.

    :ivar seen: the row in each sample; ``None`` if the sample does not have it
    :ivar decisive: :attr:`~memcg_inspect.checks.judge.Judgement.is_decisive` of each sample
    :ivar is_at_rest: whether no row of its identity changed
    """

    seen: list[Row | None]
    decisive: list[bool]
    is_at_rest: bool

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.seen)

    @property
    def rows(self) -> list[Row]:
        """
        The row in the samples that have it.

        Those before one without it do not count: another memcg may be at the address now.
        """
        rows: list[Row] = []
        for row in reversed(self.seen):
            if row is None:
                break
            rows.insert(0, row)
        return rows

    def verified(self) -> list[Row]:
        """Return the row in those samples that could verify it."""
        return [row for row in self.rows if row.status != "unverifiable"]

    def since(self) -> int:
        """Return the first of the last samples that have the same difference, an index."""
        first, newest = len(self.seen), None
        for number, row in reversed(list(enumerate(self.seen))):
            if row is None or row.status not in ("differs", "unverifiable"):
                break
            if row.status == "differs":
                newest = newest or row
                if not is_same(row, newest):
                    break
                first = number
        return first

    def same(self) -> list[Row]:
        """
        Return the row in the last samples that have the same difference.

        Samples that could not verify it are left out.
        """
        return [row for row in self.seen[self.since() :] if row and row.status == "differs"]

    def is_constant(self) -> bool:
        """Return whether all samples have the row, verified ones with the same difference."""
        same = self.same()
        return bool(same) and None not in self.seen and len(same) == len(self.verified())

    def is_far(self, samples: int = MORE_SAMPLES) -> bool:
        """Return whether the last samples have a difference that no change of the row explains."""
        last = self.verified()[-samples:]
        if len(last) < samples or any(row.status != "differs" for row in last):
            return False
        moved = _moved(last)
        least = min(abs(moved.least), abs(moved.most))
        is_one_side = moved.least > 0 or moved.most < 0
        return is_one_side and least > _FAR * (moved.found + moved.claimed)

    def is_proved(self) -> bool:
        """Return whether enough samples have the difference, and no task accounts for it."""
        same = self.same()
        if not same:
            return False  # as most rows
        is_simple = self.is_at_rest and self.is_constant()
        is_often = len(same) >= (SAMPLES if is_simple else MORE_SAMPLES)
        return (is_often or self.is_far()) and self._is_unexplained()

    def _is_unexplained(self) -> bool:
        """
        Return whether stacks were read often enough that do not account for the difference.

        A row that a waiting task may account for is unverifiable.
        """
        statuses = Counter(
            row.status
            for row, is_decisive in zip(self.seen, self.decisive, strict=True)
            if row is not None and is_decisive
        )
        return statuses["differs"] >= max(_DECISIVE, statuses["unverifiable"])

    def settled(self) -> Row | None:
        """
        Return the row of a sample that shows that it is exact or in flight.

        A row that differs can be exact in a moment, by a charge that is half done. So no difference
        may have been seen more often.
        """
        rows = self.rows
        newest = {row.status: row for row in rows}
        if "in-flight" in newest:
            return newest["in-flight"]
        differences = Counter(row.difference for row in rows if row.status == "differs")
        exact = sum(row.status == "exact" for row in rows)
        return newest["exact"] if exact and exact >= max(differences.values(), default=0) else None

    def is_moving(self) -> bool:
        """Return whether the samples do not tell if the row is exact."""
        return any(row.status == "differs" for row in self.rows) and self.settled() is None

    def moved(self) -> Moved:
        """Return how far both sides changed."""
        return _moved(self.rows)


def histories(samples: Sequence[Judgement]) -> dict[RowKey, History]:
    """Follow each row of the last sample. Rows of memcgs that no longer exist are not needed."""
    by_key = [{row_key(row): row for row in sample.rows} for sample in samples]
    decisive = [sample.is_decisive for sample in samples]
    differing = {
        row.identity for rows in by_key for row in rows.values() if row.status == "differs"
    }
    restless = {name for name in differing if _is_restless(by_key, name)}
    return {
        key: History([rows.get(key) for rows in by_key], decisive, key.identity not in restless)
        for key in by_key[-1]
    }


def is_same(row: Row, other: Row) -> bool:
    """Return whether the sides of a row are what they were in another sample."""
    # A flush moves amounts between the parts of a counter. Their sum does not change.
    return row.difference == other.difference and (
        row.found == other.found or _parts(row) == _parts(other)
    )


def _parts(row: Row) -> Counter[str]:
    """Return the parts of *found*. Stocks are added up, since draining moves bytes between them."""
    parts: Counter[str] = Counter()
    for name, value in row.found.items():
        parts["stock" if name == "nr_charged_bytes" else name] += value
    return parts


def _is_restless(samples: Sequence[Mapping[RowKey, Row]], identity: str) -> bool:
    """Return whether any row of an identity changed between samples, came or went."""
    some = [{k: row for k, row in rows.items() if k.identity == identity} for rows in samples]
    if any(rows.keys() != some[0].keys() for rows in some):
        return True
    verified = ([r for rows in some if (r := rows[k]).status != "unverifiable"] for k in some[0])
    return any(not is_same(row, rows[0]) for rows in verified for row in rows)


def _moved(rows: Sequence[Row]) -> Moved:
    found = [sum(row.found.values()) for row in rows]
    claimed = [sum(row.claimed.values()) for row in rows if row.claimed is not None]
    off = [row.difference for row in rows if row.difference is not None]
    return Moved(
        looks=len(rows),
        found=max(found) - min(found),
        claimed=max(claimed, default=0) - min(claimed, default=0),
        least=min(off, default=0),
        most=max(off, default=0),
    )
