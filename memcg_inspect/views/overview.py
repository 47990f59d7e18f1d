# SPDX-License-Identifier: LGPL-2.1-or-later
"""What each memcg is charged for, with its descendants, in one line."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import Image
from memcg_inspect.model import NUMA_NO_NODE, Memcg, counted
from memcg_inspect.tables import Answer, Field, MemcgAddress, NotRead, Table, Value, columns_of
from memcg_inspect.views.subtrees import KINDS, Subtrees
from memcg_inspect.views.view import Argument, View

__all__ = ("VIEW", "OverviewRow", "overview")


@dataclass(frozen=True)
class OverviewRow:
    """What one memcg and its descendants are charged for; with ``--by-node``, on one node."""

    memcg: Annotated[str, Field("memcg", "memcg that was not removed", priority=9)]
    memcg_address: MemcgAddress
    node: Annotated[
        int,
        Field("node", "node of the pages, with --by-node; none for what has no node", priority=9),
    ]
    current: Annotated[
        Value, Field("bytes", "memory.current; the root has none", total=True, priority=9)
    ]
    sum: Annotated[
        Value,
        Field("bytes", "sum of the amounts that follow", total=True, priority=4, shares=True),
    ]
    user: Annotated[Value, Field("bytes", "user pages and page cache", total=True, priority=8)]
    slab: Annotated[
        Value, Field("bytes", "slab objects, and large kmallocs", total=True, priority=8)
    ]
    percpu: Annotated[Value, Field("bytes", "percpu memory", total=True, priority=7)]
    stacks: Annotated[Value, Field("bytes", "kernel stacks", total=True)]
    pagetables: Annotated[Value, Field("bytes", "page tables", total=True, priority=4)]
    vmalloc: Annotated[Value, Field("bytes", "vmalloc areas", total=True, priority=3)]
    sockets: Annotated[Value, Field("bytes", "memory of sockets", total=True, priority=6)]
    zswap: Annotated[Value, Field("bytes", "compressed pages in zswap", total=True, priority=3)]
    other: Annotated[
        Value, Field("bytes", "sum of other_pages, unused and in_advance", total=True, priority=6)
    ]
    dying: Annotated[
        Value, Field("count", "removed memcgs below it that still exist", total=True, priority=7)
    ]
    other_pages: Annotated[
        Value, Field("bytes", "other pages of the kernel", shown=False, total=True)
    ]
    unused: Annotated[
        Value,
        Field("bytes", "charged for objects in whole pages, and unused", shown=False, total=True),
    ]
    in_advance: Annotated[
        Value, Field("bytes", "charged by CPUs in advance", shown=False, total=True)
    ]
    not_found: Annotated[
        Value,
        Field(
            "difference",
            "bytes of memory.current that were not found",
            shown=False,
            total=True,
            in_bytes=True,
        ),
    ]


#: The fields of :data:`~memcg_inspect.views.subtrees.KINDS`.
_FIELDS = {
    "user": "user",
    "slab": "slab",
    "percpu": "percpu",
    "kernel_stack": "stacks",
    "pagetables": "pagetables",
    "vmalloc": "vmalloc",
    "sock": "sockets",
    "zswap": "zswap",
    "other": "other_pages",
    "unused": "unused",
    "stock": "in_advance",
}
_REST = ("other_pages", "unused", "in_advance")
#: Kinds that no node is known of.
_NOWHERE = ("sock", "unused", "stock")
#: Fields that are known for all nodes together only.
_OF_MEMCGS = ("current", "dying", "not_found")


def overview(image: Image, by_node: bool = False) -> Answer:
    """
    Return what each memcg is charged for, descendants included; the largest first.

    :param by_node: whether to return a row for each node that it has memory on
    """
    snapshot = collect(image)
    subtrees = Subtrees(snapshot)
    make = _on_nodes if by_node else _rows
    rows = sorted(make(snapshot, subtrees), key=_order)
    columns = columns_of(OverviewRow, omit=_OF_MEMCGS if by_node else ("node",))
    if by_node:
        # Otherwise it says what current says.
        columns = tuple(replace(c, priority=9) if c.name == "sum" else c for c in columns)
    title = f"charged to memcgs and their descendants{', by node' if by_node else ''}"
    parents = {m.address: _above(snapshot, m) for m in snapshot.live()}
    table = Table("overview", title, columns, rows, is_ranked=True, parents=parents)
    notes = tuple(_notes(snapshot, rows, by_node))
    return Answer("overview", snapshot.image, (table,), dict(snapshot.coverage), notes)


def _above(snapshot: Snapshot, memcg: Memcg) -> int | None:
    return None if memcg.parent is None else snapshot.memcgs[memcg.parent].payer


def _rows(snapshot: Snapshot, subtrees: Subtrees) -> Iterator[OverviewRow]:
    sizes: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for (address, _, kind), size in subtrees.charges.items():
        sizes[address][kind] += size
    dying, left = _dying(snapshot), subtrees.not_found()
    is_whole, unknown = snapshot.complete("memcgs"), NotRead("memcgs are not all in the image")
    for memcg in snapshot.live():
        amounts = {
            _FIELDS[kind]: _amount(sizes[memcg.address][kind], subtrees, memcg, kind, None)
            for kind in KINDS
        }
        yield _row(
            memcg,
            NUMA_NO_NODE,
            amounts,
            current=_current(snapshot, memcg),
            dying=dying[memcg.address] if is_whole else unknown,
            not_found=left.get(memcg.address),
        )


def _on_nodes(snapshot: Snapshot, subtrees: Subtrees) -> Iterator[OverviewRow]:
    for memcg in snapshot.live():
        for nid in (*snapshot.image.nodes, NUMA_NO_NODE):
            amounts = {_FIELDS[kind]: _amount_on_node(subtrees, memcg, kind, nid) for kind in KINDS}
            if any(amounts.values()):
                yield _row(memcg, nid, amounts)


def _amount_on_node(subtrees: Subtrees, memcg: Memcg, kind: str, nid: int) -> Value:
    """Return an amount on a node; ``None`` if the kind has no nodes, or for no node if it has."""
    nowhere = subtrees.charges.get((memcg.address, NUMA_NO_NODE, kind), 0)
    if nid == NUMA_NO_NODE:
        if kind in _NOWHERE:
            return _amount(nowhere, subtrees, memcg, kind, None)
        return nowhere or None
    if kind in _NOWHERE:
        return None
    if nowhere:
        return NotRead("the node of some pages could not be read")
    found = subtrees.charges.get((memcg.address, nid, kind), 0)
    return _amount(found, subtrees, memcg, kind, nid)


def _amount(
    found: int, subtrees: Subtrees, memcg: Memcg, kind: str, nid: int | None
) -> int | NotRead:
    why = subtrees.why_missing(memcg.address, kind, nid)
    return found if why is None else NotRead(why)


def _row(
    memcg: Memcg,
    nid: int,
    amounts: Mapping[str, Value],
    current: Value = None,
    dying: Value = None,
    not_found: Value = None,
) -> OverviewRow:
    return OverviewRow(
        memcg=memcg.path,
        memcg_address=memcg.address,
        node=nid,
        current=current,
        sum=_sum(amounts.values()),
        other=_sum(amounts[name] for name in _REST),
        dying=dying,
        not_found=not_found,
        **amounts,
    )


def _sum(values: Iterable[Value]) -> Value:
    """Return the sum of amounts; unknown if one of them is."""
    total = 0
    for value in values:
        if isinstance(value, NotRead):
            return value
        total += value if isinstance(value, int) else 0
    return total


def _current(snapshot: Snapshot, memcg: Memcg) -> Value:
    if memcg.parent is None:
        return None
    pages = snapshot.usage.get(memcg.address)
    if pages is None:
        return NotRead("its page counter is not in the image")
    return pages * snapshot.image.page_size


def _dying(snapshot: Snapshot) -> Counter[int]:
    """Return the number of removed memcgs below each memcg."""
    dying: Counter[int] = Counter()
    for memcg in snapshot.memcgs.values():
        if memcg.payer != memcg.address:
            dying.update(snapshot.ancestors(memcg.payer))
    return dying


def _order(row: OverviewRow) -> tuple[object, ...]:
    # The root first, which has no memory.current, and what is not known last.
    size = row.sum if row.current is None else row.current
    return not isinstance(size, int), -size if isinstance(size, int) else 0, row.memcg, row.node


def _notes(snapshot: Snapshot, rows: Sequence[OverviewRow], by_node: bool) -> Iterator[str]:
    yield "Each row includes the memcgs below it. Totals count them once."
    if by_node:
        yield (
            "Memory of sockets, the unused part of pages that objects are charged from, and what "
            "CPUs have charged in advance belong to no node."
        )
    wrong = [row for row in rows if isinstance(row.not_found, int) and row.not_found]
    if wrong:
        # The one farthest down.
        deepest = max(wrong, key=lambda row: row.memcg.count("/"))
        yield (
            f"The sum is not memory.current in {counted(len(wrong), 'rows')}, for example of "
            f"{deepest.memcg}. memcg-inspect audit shows which counter differs, and whether a "
            "charge is half done."
        )
    if not snapshot.features.default_hierarchy:
        yield (
            "This is cgroup v1: memory.current is memory.usage_in_bytes, and sockets are charged "
            "to memory.kmem.tcp.usage_in_bytes."
        )


def _run(image: Image, args: Namespace) -> Answer:
    return overview(image, args.by_node or bool(args.node))


VIEW = View(
    name="overview",
    description="Shows in one line for each memcg, descendants included, what it is charged for: "
    "user pages, slab objects, percpu memory, kernel stacks, page tables, vmalloc areas, sockets, "
    "zswap and the rest, beside memory.current and the number of removed memcgs below it. The "
    "largest come first.",
    run=_run,
    records=(OverviewRow,),
    arguments=(
        Argument(
            ("--by-node",),
            {
                "action": "store_true",
                "help": "a line for each memcg and node (--node implies it)",
            },
        ),
    ),
    choices=("memcg", "node", "sort", "fields", "top"),
)
