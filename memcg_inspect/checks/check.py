# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Definition of an identity
-------------------------

Each module in :mod:`memcg_inspect.checks.identities` defines one identity as a
:class:`Check`. Everything that is particular to an identity is in that record.
:class:`memcg_inspect.report.Identity` is the outcome of a check on one image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memcg_inspect.checks.half_done import HalfDone
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.report import Evidence, Row

__all__ = (
    "Charges",
    "Check",
    "Explained",
    "Proof",
    "counter_differs",
    "in_flight",
    "references_differ",
)


class Charges(NamedTuple):
    """
    Which charges may explain a difference.

    :ivar kinds: kinds of the charges
    :ivar details: detail of the charges (see :class:`~memcg_inspect.checks.ledger.Entry`), by item
        of the row; any detail for other items
    :ivar modulo_page: whether a row shows only how much its charges are off from whole pages
    """

    kinds: tuple[ChargeKind, ...]
    details: Mapping[str, str] = {}
    modulo_page: bool = False


class Explained(NamedTuple):
    """
    Why a row that differs is no finding.

    :ivar status: ``in-flight`` if what was found accounts for the difference, ``unverifiable`` if
        something that is not known may
    :ivar reason: in words, for the report
    :ivar rest: what it does not account for, and half-done charges of CPUs must
    """

    status: Literal["in-flight", "unverifiable"]
    reason: str
    rest: int = 0


def in_flight(reason: str | None) -> Explained | None:
    """Return that a row is in flight for a reason; ``None`` if there is no reason."""
    return None if reason is None else Explained("in-flight", reason)


class Proof(NamedTuple):
    """
    A difference that can be proved by addresses.

    :ivar kind: kind of the finding
    :ivar what: the finding in one sentence
    :ivar evidence: all evidence; the report shows the first pieces
    """

    kind: str
    what: str
    evidence: tuple[Evidence, ...]


def counter_differs(row: Row) -> str:
    """Return a sentence that says how a counter differs from the amount found."""
    difference = row.off
    where = "" if row.nid is None else f" on node {row.nid}"
    more = "more" if difference > 0 else "less"
    amount = counted(abs(difference), row.unit)
    return f"{row.item}{where} claims {amount} {more} than was found"


def references_differ(row: Row, subject: str, if_more: str, if_fewer: str) -> str:
    """
    Return a sentence that says how a reference count differs from the references found.

    :param subject: the reference count, in words
    :param if_more: what follows from more references than were found
    :param if_fewer: what follows from fewer references
    """
    difference = row.off
    more, rest = ("more", if_more) if difference > 0 else ("less", if_fewer)
    return f"{subject} is {counted(abs(difference), row.unit)} {more} than found: {rest}"


def _no_rows(snapshot: Snapshot) -> list[Row]:
    return []


def _nothing(snapshot: Snapshot) -> None:
    return None


def _no_items(snapshot: Snapshot) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Check:
    """
    The definition of one identity.

    What it compares:

    :ivar name: name in reports
    :ivar counter: the counters, for the list in ``docs/identities.md`` (Markdown)
    :ivar unit: units of its rows, for that list
    :ivar found: charges that are added up, for that list
    :ivar sources: the parts that :attr:`Row.found` can have
    :ivar places: the parts that :attr:`Row.claimed` can have
    :ivar rows: returns its rows
    :ivar derive: used instead of *rows* if the rows are made from rows of earlier checks. It takes
        the rows of all earlier checks that add up charges (see *counters_only*).
    :ivar items: enumerators of the counters that it reads. It is ``not-kept`` on a kernel that has
        none of them.
    :ivar node_items: returns the enumerators of the counters of whole nodes that it compares
    :ivar zone_items: enumerators of the counters of zones that it compares with memory
    :ivar page_counters: the page counters that it compares, members of ``struct mem_cgroup``
    :ivar not_kept: returns any other reason why a kernel does not keep the identity
    :ivar counters_only: whether both sides of its rows are counters
    :ivar of_subtrees: whether its rows include the descendants of a memcg
    :ivar of_whole_nodes: whether its rows are about all memory of a node. So they change while this
        program allocates memory on the machine that it reads
    :ivar by_node_rule: whether its rows depend on the node that per-node accounting books a
        charge to; see :mod:`memcg_inspect.checks.pernode`

    How a row that differs is explained or reported:

    :ivar half_done: charge that a stopped CPU may have left half done; ``None`` for none
    :ivar explain: returns why a row that differs is no finding; ``None`` if it is a finding
    :ivar charges: which charges to list as evidence; ``None`` for none
    :ivar above: kind of the finding if the counter exceeds the amount found
    :ivar below: kind of the finding if the amount found exceeds the counter
    :ivar sentence: returns a sentence that says how a row differs
    :ivar prove: returns the proof of a row that differs. If it is given, *charges*, *above*,
        *below* and *sentence* are not used.
    """

    name: str
    counter: str
    unit: str
    found: str
    sources: tuple[str, ...]
    places: tuple[str, ...]
    rows: Callable[[Snapshot], list[Row]] = _no_rows
    derive: Callable[[Snapshot, Sequence[Row]], list[Row]] | None = None
    items: tuple[str, ...] = ()
    node_items: Callable[[Snapshot], Iterable[str]] = _no_items
    zone_items: tuple[str, ...] = ()
    page_counters: tuple[str, ...] = ()
    not_kept: Callable[[Snapshot], str | None] = _nothing
    counters_only: bool = False
    of_subtrees: bool = False
    of_whole_nodes: bool = False
    by_node_rule: bool = False
    half_done: HalfDone | None = None
    explain: Callable[[Snapshot, Row], Explained | None] | None = None
    charges: Charges | None = None
    above: str = "counter-above-objects"
    below: str = "counter-below-objects"
    sentence: Callable[[Row], str] = field(default=counter_differs)
    prove: Callable[[Snapshot, Row], Proof] | None = None

    def why_not_kept(self, snapshot: Snapshot) -> str | None:
        """Return why the kernel does not keep the identity; ``None`` if it does."""
        if self.items and not snapshot.features.items.intersection(self.items):
            return f"this kernel does not keep {' or '.join(self.items)}"
        return self.not_kept(snapshot)
