# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Conservation of kernel memory
-----------------------------

Between two snapshots, the counter of kernel memory of a memcg grows by what was charged, less what
was uncharged, and so does what is found in memory. If they do not grow alike, something was charged
and not uncharged, or the other way, or on another node: on kernels that account by node, the
counter is one for each node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from memcg_inspect.model import counted
from memcg_inspect.model_snapshot import ChargeSnapshot, MemcgKey, is_same_boot
from memcg_inspect.tables import Field, Table, columns_of

__all__ = ("ConservationRow", "conservation_notes", "conservation_table")

_EMPTY = "counters of kernel memory grew as what was found did"


@dataclass(frozen=True)
class ConservationRow:
    """A counter of kernel memory that grew otherwise than what was found in memory."""

    memcg: Annotated[str, Field("memcg", "memcg of the counter", priority=9)]
    node: Annotated[
        int | None,
        Field("node", "node of the counter, on kernels that account by node", priority=9),
    ]
    item: Annotated[str, Field("text", "the kernel's name of the counter", priority=5)]
    counter: Annotated[
        int, Field("difference", "growth of the counter in bytes", priority=8, in_bytes=True)
    ]
    found: Annotated[
        int, Field("difference", "growth of what was found, in bytes", priority=8, in_bytes=True)
    ]
    difference: Annotated[
        int,
        Field("difference", "the first less the second", total=True, priority=9, in_bytes=True),
    ]


class _Amounts(NamedTuple):
    """A counter of kernel memory, and what was found, in pages; ``None`` if that is not known."""

    counter: int
    found: int | None


_Place = tuple[MemcgKey, "int | None", str]


class _Counters:
    """
    The counters of kernel memory of a snapshot.

    :param has_ids: whether memcgs are told by their IDs, too: they change with each boot
    """

    def __init__(self, some: ChargeSnapshot, has_ids: bool) -> None:
        memcgs = [MemcgKey(m.path, m.cgroup_id if has_ids else None) for m in some.memcgs]
        live = (m.state == "online" for m in some.memcgs)
        self._live = {memcg for memcg, is_live in zip(memcgs, live, strict=True) if is_live}
        item = "NR_KMEM" if some.image.accounting == "kmem-per-node" else "MEMCG_KMEM"
        self.page_size = some.image.page_size
        self.places: dict[_Place, _Amounts] = {
            (memcgs[counter.memcg], counter.node, item): _Amounts(counter.value, counter.found)
            for counter in some.counters
            if counter.item == item
        }

    def at(self, place: _Place) -> _Amounts | None:
        """Return a counter; ``None`` if it is not known. A memcg that is not there uses nothing."""
        if place in self.places:
            return self.places[place]
        return None if place[0] in self._live else _Amounts(0, 0)


def conservation_table(before: ChargeSnapshot, after: ChargeSnapshot) -> Table:
    """Compare how counters of kernel memory grew with how what was found did."""
    compared = list(_compared(before, after))
    rows = [row for row in compared if row.difference]
    rows.sort(key=lambda row: (-abs(row.difference), row.memcg, str(row.node)))
    title = "growth of kernel memory by its counters, and as found"
    empty = f"{_EMPTY} ({counted(len(compared), 'counters')})" if compared else "nothing to compare"
    return Table("conservation", title, columns_of(ConservationRow), rows, empty=empty)


def conservation_notes(before: ChargeSnapshot, after: ChargeSnapshot) -> Iterator[str]:
    """Return what is to be known of the table."""
    if before.is_moving or after.is_moving:
        yield (
            "A running machine is not read at once: counters of kernel memory that grew otherwise "
            "than what was found show a fault only if nothing was charged meanwhile."
        )


def _compared(before: ChargeSnapshot, after: ChargeSnapshot) -> Iterator[ConservationRow]:
    has_ids = is_same_boot(before, after)
    old, new = _Counters(before, has_ids), _Counters(after, has_ids)
    if old.places and new.places and _items(old) != _items(new):
        return  # the kernels account in other ways
    for place in {**old.places, **new.places}:
        one, other = old.at(place), new.at(place)
        if one is None or other is None or one.found is None or other.found is None:
            continue
        counter = other.counter * new.page_size - one.counter * old.page_size
        found = other.found * new.page_size - one.found * old.page_size
        memcg, nid, item = place
        yield ConservationRow(memcg.path, nid, item, counter, found, counter - found)


def _items(some: _Counters) -> set[str]:
    return {item for _, _, item in some.places}
