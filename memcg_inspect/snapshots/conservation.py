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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from memcg_inspect.model import counted
from memcg_inspect.model_snapshot import ChargeSnapshot
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
    """A counter of kernel memory, and what was found, in pages."""

    counter: int
    found: int | None


_Key = tuple[str, int | None, str]
_NOTHING = _Amounts(0, 0)


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
    if any(some.image.source != "vmcore" for some in (before, after)):
        yield (
            "A running machine is not read at once: counters of kernel memory that grew otherwise "
            "than what was found show a fault only if nothing was charged meanwhile."
        )


def _compared(before: ChargeSnapshot, after: ChargeSnapshot) -> Iterator[ConservationRow]:
    old, new = _kernel_memory(before), _kernel_memory(after)
    if {item for _, _, item in old} ^ {item for _, _, item in new} and old and new:
        return  # the kernels account in other ways
    for key in {**old, **new}:
        one, other = old.get(key, _NOTHING), new.get(key, _NOTHING)
        if one.found is None or other.found is None:
            continue
        counter = other.counter * after.image.page_size - one.counter * before.image.page_size
        found = other.found * after.image.page_size - one.found * before.image.page_size
        yield ConservationRow(*key, counter, found, counter - found)


def _kernel_memory(some: ChargeSnapshot) -> Mapping[_Key, _Amounts]:
    """Return the counters of kernel memory by path, node and name."""
    return {
        (some.memcgs[counter.memcg].path, counter.node, counter.item): _Amounts(
            counter.value, counter.found
        )
        for counter in some.counters
        if counter.item == _item_of(some)
    }


def _item_of(some: ChargeSnapshot) -> str:
    return "NR_KMEM" if some.image.accounting == "kmem-per-node" else "MEMCG_KMEM"
