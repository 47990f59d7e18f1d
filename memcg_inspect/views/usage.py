# SPDX-License-Identifier: LGPL-2.1-or-later
"""What memory.current of a memcg consists of, and what memory.stat shows of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import on_default_hierarchy
from memcg_inspect.model import Memcg, counted
from memcg_inspect.tables import (
    Answer,
    Field,
    MemcgAddress,
    NotRead,
    Table,
    UsageError,
    Value,
    columns_of,
)
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.stat import StatRow, stat
from memcg_inspect.views.subtrees import KINDS, Subtrees
from memcg_inspect.views.view import ONE_MEMCG, Argument, View

__all__ = ("VIEW", "UsageRow", "usage")

_CURRENT, _LEFT = "memory.current", "not found"

#: What memory is charged for: its name in the output, and its lines in memory.stat.
_TERMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "user": (
        "user pages and page cache",
        ("inactive_anon", "active_anon", "inactive_file", "active_file", "unevictable"),
    ),
    "slab": ("slab objects", ("slab_reclaimable", "slab_unreclaimable")),
    "percpu": ("percpu memory", ("percpu",)),
    "zswap": ("compressed pages (zswap)", ("zswap",)),
    "kernel_stack": ("kernel stacks", ("kernel_stack",)),
    "pagetables": ("page tables", ("pagetables",)),
    "vmalloc": ("vmalloc areas", ("vmalloc",)),
    "other": ("other pages of the kernel", ()),
    "unused": ("charged for objects, and unused", ()),
    "sock": ("sockets", ("sock",)),
    "stock": ("charged by CPUs in advance", ()),
}
#: What the line ``kernel`` of memory.stat adds up.
_KERNEL = tuple(kind for kind in KINDS if kind not in ("user", "sock", "stock"))


@dataclass(frozen=True)
class UsageRow:
    """One part of ``memory.current``."""

    memcg: Annotated[str, Field("memcg", "memcg", shown=False)]
    memcg_address: MemcgAddress
    what: Annotated[str, Field("text", "what is charged; the first row is the sum of the others")]
    bytes: Annotated[
        Value, Field("bytes", "bytes that are charged, including descendants", priority=9)
    ]
    memory_stat: Annotated[
        Value, Field("bytes", "what a reader of memory.stat sees, without a flush")
    ]
    not_folded: Annotated[
        Value, Field("difference", "changes that memory.stat has only after a flush", in_bytes=True)
    ]
    in_stocks: Annotated[
        Value,
        Field(
            "difference",
            "changes that the object stocks of CPUs hold, whatever is flushed",
            in_bytes=True,
        ),
    ]
    items: Annotated[str, Field("text", "lines of memory.stat that are added up", shown=False)]


def usage(image: Image, memcg: str) -> Answer:
    """
    Return what ``memory.current`` of a memcg consists of.

    :param memcg: path or address
    :raises UsageError: if there is no such memcg, or it has no ``memory.current``
    """
    snapshot, chosen = collect(image), _choose(Payers(image), memcg)
    lines = stat(image, f"{chosen.address:#x}", show_all=True, walk=False).tables[0].rows
    stats = {row.item: row for row in lines if row.node is None}
    subtrees = Subtrees(snapshot)
    left = subtrees.not_found()[chosen.address]
    rows = list(_rows(snapshot, subtrees, chosen, stats, left))
    table = Table("usage", f"{_CURRENT} of {chosen.path}", columns_of(UsageRow), rows)
    notes = tuple(_notes(image, stats, rows, left))
    return Answer("usage", snapshot.image, (table,), dict(snapshot.coverage), notes)


def _choose(payers: Payers, wanted: str) -> Memcg:
    """
    Return the memcg of a path or address.

    :raises UsageError: if it has no ``memory.current``
    """
    chosen = min(payers.find(wanted), key=lambda memcg: memcg.state != "online")
    if chosen.parent is None:
        raise UsageError(
            "the root has no memory.current, since its own memory is not charged: "
            "choose a memcg below it"
        )
    if chosen.state == "dying":
        raise UsageError(
            f"{chosen.path} was removed, so nothing reads its memory.current: "
            f"memcg-inspect dying --memcg {chosen.address:#x} shows what is left of it"
        )
    return chosen


def _rows(
    snapshot: Snapshot,
    subtrees: Subtrees,
    chosen: Memcg,
    stats: Mapping[str, StatRow],
    left: int | NotRead,
) -> Iterator[UsageRow]:
    found = dict.fromkeys(KINDS, 0)
    for (memcg, _, kind), size in subtrees.charges.items():
        if memcg == chosen.address:
            found[kind] += size

    def row(what: str, size: Value, items: Sequence[str] = ()) -> UsageRow:
        shown, pending = _read_by(stats, items)
        held: Value = None
        if items and what == _TERMS["slab"][0]:
            held = _in_stocks(snapshot, chosen)
        elif items:
            held = 0
        names = " + ".join(items)
        return UsageRow(chosen.path, chosen.address, what, size, shown, pending, held, names)

    pages = snapshot.usage.get(chosen.address)
    unread = NotRead("its page counter is not in the image")
    yield row(_CURRENT, unread if pages is None else pages * snapshot.image.page_size)
    for kind, (what, items) in _TERMS.items():
        why = subtrees.why_missing(chosen.address, kind)
        total: Value = found[kind] if why is None else NotRead(why)
        yield row(what, total, [item for item in items if item in stats])
    yield row(_LEFT, left)


def _in_stocks(snapshot: Snapshot, chosen: Memcg) -> Value:
    """Return the slab bytes that no counter has yet."""
    if not snapshot.complete("stock"):
        return NotRead("object stocks are not all in the image")
    return sum(
        stock.reclaimable + stock.unreclaimable
        for stock in snapshot.stocks
        if chosen.address in snapshot.ancestors(snapshot.payer(stock.objcg))
    )


def _read_by(stats: Mapping[str, StatRow], items: Sequence[str]) -> tuple[Value, Value]:
    """Return the sum of some lines of memory.stat without a flush, and what a flush adds."""
    if not items:
        return None, None
    shown = pending = 0
    for item in items:
        line = stats[item]
        if not isinstance(line.folded, int) or not isinstance(line.pending, int):
            return line.folded, line.pending
        shown, pending = shown + line.folded, pending + line.pending
    return shown, pending


def _notes(
    image: Image, stats: Mapping[str, StatRow], rows: Sequence[UsageRow], left: int | NotRead
) -> Iterator[str]:
    kernel = stats.get("kernel")
    if kernel is not None and isinstance(kernel.folded, int) and isinstance(kernel.pending, int):
        names = {_TERMS[kind][0] for kind in _KERNEL}
        found = [row.bytes for row in rows if row.what in names]
        total = sum(size for size in found if isinstance(size, int))
        yield (
            f"Kernel memory is {counted(total, 'bytes')} in all. The line kernel of memory.stat "
            f"shows {kernel.folded:,}, and a flush changes that by {kernel.pending:+,}."
        )
    if left:
        yield (
            "Part of memory.current was not found, or more was found than it says. "
            "memcg-inspect audit shows which counter differs, and whether a charge is half done."
        )
    if not on_default_hierarchy(image):
        yield (
            "This is cgroup v1: memory.current is memory.usage_in_bytes, and sockets are charged "
            "to memory.kmem.tcp.usage_in_bytes."
        )


def _run(image: Image, args: Namespace) -> Answer:
    return usage(image, args.memcg_path)


VIEW = View(
    name="usage",
    description="Adds up what a memcg and its descendants are charged for, until nothing of "
    "memory.current is left, beside what a reader of memory.stat sees of each part.",
    run=_run,
    records=(UsageRow,),
    arguments=(Argument(("memcg_path",), {"metavar": "MEMCG", "help": ONE_MEMCG}),),
    choices=("sort", "fields"),
)
