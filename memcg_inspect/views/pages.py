# SPDX-License-Identifier: LGPL-2.1-or-later
"""All page frames of the machine: what each is used for, and who pays."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from memcg_inspect.checks.zone_pages import why_lists_may_change
from memcg_inspect.collect.image_info import image_info
from memcg_inspect.collect.inventory import read_inventory
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage
from memcg_inspect.model_pages import (
    KINDS,
    NEVER,
    NOBODY,
    UNKNOWN_PAYER,
    UNUSED,
    Inventory,
    Place,
    Zone,
)
from memcg_inspect.tables import Answer, Field, MemcgAddress, NotRead, Table, Value, columns_of
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import Argument, View, by_argument, named, narrowed_by

__all__ = ("VIEW", "CounterRow", "PagesRow", "ZoneRow", "pages")


@dataclass(frozen=True)
class PagesRow:
    """Page frames of one kind, in one zone of one node; with ``--by``, by the fields chosen."""

    memcg: Annotated[
        Value,
        Field("memcg", "memcg that pays, with --by memcg; none if no memcg pays", priority=9),
    ]
    memcg_address: MemcgAddress
    node: Annotated[int | None, Field("node", "node of the pages", priority=9)]
    zone: Annotated[str | None, Field("text", "zone of the pages", priority=7)]
    kind: Annotated[str | None, Field("text", "what the pages are", priority=9)]
    order: Annotated[
        int | None,
        Field("number", "order of the block or compound page, with --by order", priority=6),
    ]
    cache: Annotated[str | None, Field("text", "cache of the slabs, with --by cache", priority=8)]
    caller: Annotated[
        str | None,
        Field(
            "text",
            "with --by caller: function that made the vmalloc areas; line that allocated unknown "
            "pages, with allocation profiling",
            priority=8,
        ),
    ]
    lru: Annotated[
        str | None,
        Field(
            "text",
            "LRU list of user pages, with --by lru; mlocked: unevictable, since a process has "
            "locked them; "
            "none: on no list",
            priority=6,
        ),
    ]
    pages: Annotated[
        Value,
        Field(
            "pages",
            "number of page frames; not with --by memcg, since memcgs share pages",
            total=True,
            priority=9,
        ),
    ]
    bytes: Annotated[Value, Field("bytes", "size of the pages", total=True, shares=True)]
    paid: Annotated[Value, Field("bytes", "bytes that memcgs pay for", total=True, priority=8)]
    unpaid: Annotated[
        Value,
        Field(
            "bytes",
            "bytes in use that no memcg pays for, of a kind that memcgs can pay for",
            total=True,
            priority=8,
        ),
    ]
    never: Annotated[
        Value,
        Field("bytes", "bytes in use, of a kind that is never charged", total=True, priority=7),
    ]
    unused: Annotated[
        Value,
        Field(
            "bytes",
            "bytes that nobody uses: free pages, and the free part of slabs and percpu memory",
            total=True,
            priority=6,
        ),
    ]


@dataclass(frozen=True)
class ZoneRow:
    """All page frames of one zone of one node."""

    node: Annotated[int, Field("node", "node", priority=9)]
    zone: Annotated[str, Field("text", "zone", priority=9)]
    present: Annotated[
        int, Field("pages", "present_pages of the zone: what the kernel says", total=True)
    ]
    found: Annotated[int, Field("pages", "page frames found", total=True)]
    holes: Annotated[
        int,
        Field("pages", "page frames with a struct page that are no memory", total=True, priority=3),
    ]
    free: Annotated[int, Field("pages", "free pages", total=True, priority=7)]
    user: Annotated[int, Field("pages", "pages of user space", total=True, priority=7)]
    kernel: Annotated[int, Field("pages", "pages of the kernel", total=True, priority=7)]
    other: Annotated[
        int,
        Field(
            "pages",
            "pages that nobody can use: offline, poisoned, or set aside for hugetlb or a crash",
            total=True,
            priority=4,
        ),
    ]
    unknown: Annotated[int, Field("pages", "pages of no known use", total=True, priority=7)]
    kernel_paid: Annotated[
        Value, Field("bytes", "bytes of kernel memory that memcgs pay for", total=True, priority=8)
    ]
    kernel_unpaid: Annotated[
        Value,
        Field(
            "bytes",
            "other bytes of kernel memory, unused parts and pages of no known use included",
            total=True,
            priority=8,
        ),
    ]


@dataclass(frozen=True)
class CounterRow:
    """One counter of page frames, and what it counts."""

    node: Annotated[int | None, Field("node", "node; none for a counter of all", priority=9)]
    zone: Annotated[str | None, Field("text", "zone", priority=9)]
    counter: Annotated[
        str,
        Field(
            "text",
            "counter; free_area is nr_free of all orders, and of each order that differs",
            priority=9,
        ),
    ]
    says: Annotated[
        int, Field("pages", "its value, with the changes that CPUs have not added yet", priority=8)
    ]
    found: Annotated[int, Field("pages", "page frames found that it counts", priority=8)]
    difference: Annotated[
        int, Field("difference", "what the counter says, less what was found", priority=7)
    ]
    note: Annotated[str | None, Field("text", "why a difference need not be an error", priority=5)]


#: The dimensions of ``--by``.
DIMENSIONS = ("memcg", "node", "zone", "kind", "order", "cache", "caller", "lru")
_DEFAULT = ("node", "zone", "kind")
_ORPHAN = NotRead("charged to an obj_cgroup that does not exist or is not in the image")
_NOT_ALL_COUNTED = "the memory map of huge pages, of devices and of added memory is not all counted"
#: Names of the fields for payers that are no memcgs.
_FIELDS = {NOBODY: "unpaid", NEVER: "never", UNUSED: "unused"}


@dataclass
class _Cell:
    """
    The sums of a row.

    :ivar pages: number of pages; has no meaning for a memcg, which may have parts of some
    :ivar bytes: bytes by field: ``paid``, ``unpaid``, ``never`` or ``unused``
    """

    pages: int = 0
    bytes: Counter[str] = field(default_factory=Counter)


#: What identifies a row: the memcg that pays, and the dimensions of the place.
_Key = tuple[int | None, Place]


def pages(image: Image, by: Collection[str] | None = None, counters: bool = False) -> Answer:
    """
    Return all page frames that are present, by what they are used for.

    :param by: any of :data:`DIMENSIONS`; by default node, zone and kind
    :param counters: whether to return a table of counters of page frames, too
    """
    payers = Payers(image)
    coverage = payers.coverage
    inventory = read_inventory(image, payers.memcgs, payers.payer, coverage)
    compared = list(_counter_rows(inventory))
    _compare(inventory, compared, image.is_moving, coverage["zones"])
    wanted = [name for name in DIMENSIONS if name in (by or _DEFAULT)]
    cells = _cells(inventory, wanted, mem_map(image).page_size)
    rows = [_row(payers, inventory, key, cell) for key, cell in cells.items()]
    rows.sort(key=_order if by else _by_place)
    omit = [name for name in DIMENSIONS if name not in wanted]
    # Memcgs share slabs and pages of percpu memory.
    omit.append("pages" if "memcg" in wanted else "memcg_address")
    title = f"page frames by {named(wanted)}"
    columns = columns_of(PagesRow, omit=omit)
    first = Table("pages", title, columns, rows, is_ranked=by is not None)
    zones = list(_zone_rows(inventory, mem_map(image).page_size))
    tables = [first, Table("zones", "zones of nodes", columns_of(ZoneRow), zones)]
    if counters:
        title = "counters of page frames"
        tables.append(Table("counters", title, columns_of(CounterRow), compared))
    notes = tuple(_notes(image, inventory))
    return Answer("pages", image_info(image), tuple(tables), dict(coverage), notes)


def _compare(
    inventory: Inventory, counters: Iterable[CounterRow], is_moving: bool, coverage: Coverage
) -> None:
    """
    Count what differs from what the kernel says as unreadable.

    Counters of a running kernel change while pages are read.
    """
    found = inventory.present()
    for key, zone in inventory.zones.items():
        if found[key] != zone.present:
            reason = f"{zone.present:,} pages are present, and {found[key]:,} were found"
            coverage.miss(f"zone {zone.name} of node {zone.nid}", 0, reason)
    for row in counters:
        if row.difference and row.note is None and not is_moving:
            where = "" if row.zone is None else f" of zone {row.zone} of node {row.node}"
            reason = f"it says {row.says:,} pages, and {row.found:,} were found"
            coverage.miss(f"counter {row.counter}{where}", 0, reason)


def _counter_rows(inventory: Inventory) -> Iterator[CounterRow]:
    kinds: Counter[tuple[int, int, str]] = Counter()
    orders: Counter[tuple[int, int, int]] = Counter()
    for place, pages in inventory.pages.items():
        kinds[place.nid, place.zone, place.kind] += pages
        if place.kind == "free" and place.order is not None:
            orders[place.nid, place.zone, place.order] += pages
    for (nid, number), zone in sorted(inventory.zones.items()):
        free, unaccepted = (kinds[nid, number, kind] for kind in ("free", "unaccepted"))
        listed = [blocks << order for order, blocks in enumerate(zone.free_blocks)]
        counted = zone.counter("NR_UNACCEPTED") or 0
        parts = [
            ("NR_FREE_PAGES", free - zone.isolated + unaccepted),
            ("NR_UNACCEPTED", unaccepted),
            ("NR_ZSPAGES", kinds[nid, number, "zsmalloc"]),
        ]
        said = {item: sum(stat) for item, stat in zone.stats.items()}
        said["free_area"] = sum(listed)
        for order, pages in enumerate(listed):
            # What is too much of one order may be too little of another.
            if pages != orders[nid, number, order]:
                item = f"free_area[{order}]"
                said[item] = pages
                parts.append((item, orders[nid, number, order]))
        for item, found in [("free_area", free), *parts]:
            if item in said and (said[item] or found):
                difference = said[item] - found
                note = None
                if difference and item != "NR_ZSPAGES":
                    note = _why_free_pages_differ(zone, counted, unaccepted)
                yield CounterRow(nid, zone.name, item, said[item], found, difference, note)
    if inventory.memmap is not None:
        found = sum(n for (_, _, kind), n in kinds.items() if kind in ("memmap", "page_ext"))
        said_ = inventory.memmap
        # vmemmap_get_tail(), for example, does not count what it allocates.
        note = None if said_ == found else _NOT_ALL_COUNTED
        yield CounterRow(None, None, "nr_memmap_pages", said_, found, said_ - found, note)


def _why_free_pages_differ(zone: Zone, counted: int, found: int) -> str | None:
    """
    Return why a counter of free pages of a sound kernel may differ from what was found.

    :param counted: pages that are not accepted, as the kernel says
    :param found: these pages, as far as they are marked
    """
    if counted != found:
        return "not all pages that are not accepted yet are marked (before 6.12)"
    return why_lists_may_change(zone)


def _cells(inventory: Inventory, by: Collection[str], page_size: int) -> dict[_Key, _Cell]:
    cells: dict[_Key, _Cell] = {}
    omitted = {name: None for name in DIMENSIONS[4:] if name not in by}
    for name, none in (("node", -1), ("zone", -1), ("kind", "")):
        if name not in by:
            omitted["nid" if name == "node" else name] = none  # type: ignore[assignment]
    for (place, payer), size in inventory.bytes.items():
        if not size:
            continue
        memcg = payer if "memcg" in by and payer not in _FIELDS else None
        cell = cells.setdefault((memcg, place._replace(**omitted)), _Cell())  # type: ignore[arg-type]
        cell.bytes[_FIELDS.get(payer, "paid")] += size
    for cell in cells.values():
        cell.pages = cell.bytes.total() // page_size
    return cells


def _row(payers: Payers, inventory: Inventory, key: _Key, cell: _Cell) -> PagesRow:
    memcg, place = key
    zone = next((z.name for (_, n), z in inventory.zones.items() if n == place.zone), None)
    return PagesRow(
        memcg=_ORPHAN if memcg == UNKNOWN_PAYER else payers.path(memcg),
        memcg_address=None if memcg == UNKNOWN_PAYER else memcg,
        node=place.nid,
        zone=zone,
        kind=place.kind,
        order=place.order,
        cache=place.cache,
        caller=place.caller,
        lru=place.lru,
        pages=cell.pages,
        bytes=cell.bytes.total(),
        paid=cell.bytes["paid"],
        unpaid=cell.bytes["unpaid"],
        never=cell.bytes["never"],
        unused=cell.bytes["unused"],
    )


def _by_place(row: PagesRow) -> tuple[object, ...]:
    kinds = list(KINDS)
    kind = kinds.index(row.kind) if row.kind in kinds else -1
    return row.node, kind, row.zone or ""


def _order(row: PagesRow) -> tuple[object, ...]:
    # The largest first.
    size = row.bytes if isinstance(row.bytes, int) else 0
    what = (str(row.memcg), row.memcg_address or 0, row.node, row.zone or "", row.kind or "")
    return -size, *what, row.order or 0, row.cache or "", row.caller or "", row.lru or ""


def _zone_rows(inventory: Inventory, page_size: int) -> Iterator[ZoneRow]:
    found, groups = inventory.present(), _groups(inventory)
    paid: Counter[tuple[int, int]] = Counter()
    for (place, payer), size in inventory.bytes.items():
        if KINDS[place.kind].group == "kernel" and payer not in _FIELDS:
            paid[place.nid, place.zone] += size
    for (nid, number), zone in sorted(inventory.zones.items()):
        key = (nid, number)
        of_kernel = (groups["kernel"][key] + groups["unknown"][key]) * page_size
        yield ZoneRow(
            node=nid,
            zone=zone.name,
            present=zone.present,
            found=found[key],
            holes=inventory.holes[key],
            free=groups["free"][key],
            user=groups["user"][key],
            kernel=groups["kernel"][key],
            other=groups["other"][key],
            unknown=groups["unknown"][key],
            kernel_paid=paid[key],
            kernel_unpaid=of_kernel - paid[key],
        )


def _groups(inventory: Inventory) -> Mapping[str, Counter[tuple[int, int]]]:
    groups: dict[str, Counter[tuple[int, int]]] = {kind.group: Counter() for kind in KINDS.values()}
    for place, number in inventory.pages.items():
        groups[KINDS[place.kind].group][place.nid, place.zone] += number
    return groups


def _notes(image: Image, inventory: Inventory) -> Iterator[str]:
    if image.is_moving and any(place.kind == "unknown" for place in inventory.pages):
        yield (
            "The kernel ran while its page frames were read. Some of the unknown ones were free, "
            "and were allocated before the lists of free pages of CPUs were read."
        )
    if not page_layout(image).has_large_kmalloc:
        yield (
            "This kernel does not mark large kmallocs. Those of some known owners are "
            "large_kmalloc. Others that a memcg pays for are kmem, and the rest is unknown."
        )


def _run(image: Image, args: Namespace) -> Answer:
    by = args.by and [*args.by, *narrowed_by(args)]
    if not by and args.memcg:
        by = [*_DEFAULT, "memcg"]
    return pages(image, by, args.counters)


VIEW = View(
    name="pages",
    description="Shows for each node and zone what all its page frames are used for: free, user "
    "pages, slabs, page tables, percpu memory, vmalloc areas, the memory map and so on, and how "
    "much of it memcgs pay for. The numbers add up to the pages that are present.",
    run=_run,
    records=(PagesRow, ZoneRow, CounterRow),
    arguments=(
        by_argument(DIMENSIONS),
        Argument(
            ("--counters",),
            {"action": "store_true", "help": "compare the kernel's counters with what was found"},
        ),
    ),
    choices=("memcg", "node", "sort", "fields", "top"),
)
