# SPDX-License-Identifier: LGPL-2.1-or-later
"""Stocks: amounts that CPUs have charged in advance, and how far off counters can be."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from memcg_inspect.collect.image_info import image_info
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol_stock import (
    charge_stock_bound,
    objcg_bytes_bound,
    read_charge_stocks,
    read_obj_stocks,
    slab_bytes_bound,
)
from memcg_inspect.linux.mm.mmzone import mem_map, possible_cpus
from memcg_inspect.model import ChargeStock, ObjStock
from memcg_inspect.tables import Answer, Field, MemcgAddress, NotRead, Table, Value, columns_of
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import View

__all__ = ("VIEW", "BoundRow", "StockRow", "stock")


@dataclass(frozen=True)
class StockRow:
    """One slot of the charge stock (``memcg_stock``) or the object stock of a CPU."""

    cpu: Annotated[int, Field("number", "CPU whose stock it is")]
    stock: Annotated[
        str, Field("text", "charge: whole pages; object: bytes of charged pages", priority=8)
    ]
    slot: Annotated[int, Field("number", "index in the stock")]
    memcg: Annotated[Value, Field("memcg", "memcg that is charged", priority=9)]
    memcg_address: MemcgAddress
    objcg: Annotated[
        int | None, Field("address", "struct obj_cgroup *, of an object stock", priority=2)
    ]
    node: Annotated[Value, Field("node", "node of the slab bytes that are not booked yet")]
    charged: Annotated[
        Value, Field("bytes", "charged to the memcg and not handed out", total=True, priority=8)
    ]
    reclaimable: Annotated[
        Value, Field("bytes", "not booked yet as NR_SLAB_RECLAIMABLE_B", total=True, priority=6)
    ]
    unreclaimable: Annotated[
        Value, Field("bytes", "not booked yet as NR_SLAB_UNRECLAIMABLE_B", total=True, priority=6)
    ]
    locked: Annotated[
        Value, Field("flag", "whether the CPU was in the middle of using it", shown=False)
    ]


@dataclass(frozen=True)
class BoundRow:
    """How far one counter can be off because of stocks."""

    counter: Annotated[str, Field("text", "file, or line of memory.stat, that can be off")]
    error: Annotated[
        str, Field("text", "how the counter can differ from the memory in use", priority=6)
    ]
    slots: Annotated[
        int,
        Field(
            "count",
            "slots of a CPU that can hold such an amount; one memcg may use all",
            priority=4,
        ),
    ]
    each: Annotated[Value, Field("bytes", "upper bound for one slot")]
    cpu_bound: Annotated[Value, Field("bytes", "upper bound for one CPU")]
    bound: Annotated[Value, Field("bytes", "upper bound for all possible CPUs", priority=9)]
    held: Annotated[int, Field("bytes", "sum of the absolute amounts in all slots now", priority=8)]
    rule: Annotated[str, Field("text", "where the bound comes from", priority=2)]


_NO_LOCK = NotRead("the lock of this kernel's stocks does not record whether it is held")


def stock(image: Image) -> Answer:
    """Return the contents of the stocks of all possible CPUs, and their bounds."""
    payers = Payers(image)
    charges = read_charge_stocks(image, payers.coverage["charge_stock"])
    objects = read_obj_stocks(image, payers.coverage["stock"])
    rows = sorted(
        [*_charge_stocks(image, payers, charges), *_obj_stocks(payers, objects)],
        key=lambda row: (row.cpu, row.stock, row.slot),
    )
    bounds = list(_bounds(image, payers, charges, objects))
    tables = (
        Table("stock", "stocks of CPUs", columns_of(StockRow), rows, empty="all stocks are empty"),
        Table("bounds", "how far counters can be off", columns_of(BoundRow), bounds),
    )
    return Answer("stock", image_info(image), tables, dict(payers.coverage))


def _bounds(
    image: Image, payers: Payers, charges: Sequence[ChargeStock], objects: Sequence[ObjStock]
) -> Iterator[BoundRow]:
    coverage, cpus = payers.coverage["slab_caches"], len(possible_cpus(image))
    page_size = mem_map(image).page_size
    slab = slab_bytes_bound(image, coverage)
    reclaimable = sum(abs(held.reclaimable) for held in objects)
    unreclaimable = sum(abs(held.unreclaimable) for held in objects)
    for counter, error, bound, held in (
        ("memory.current", "too much", charge_stock_bound(image),
         page_size * sum(held.nr_pages for held in charges)),
        ("kernel", "too much", objcg_bytes_bound(image, coverage),
         sum(held.nr_bytes for held in objects)),
        ("slab_reclaimable", "either way", slab, reclaimable),
        ("slab_unreclaimable", "either way", slab, unreclaimable),
    ):  # fmt: skip
        each: Value = NotRead("the size of the largest slab cache could not be read")
        on_cpu = everywhere = each
        if bound.each is not None:
            each, on_cpu = bound.each, bound.slots * bound.each
            everywhere = cpus * on_cpu
        yield BoundRow(counter, error, bound.slots, each, on_cpu, everywhere, held, bound.rule)


def _charge_stocks(
    image: Image, payers: Payers, stocks: Sequence[ChargeStock]
) -> Iterator[StockRow]:
    for held in stocks:
        if not held.nr_pages:
            continue  # it holds a reference only
        yield StockRow(
            cpu=held.cpu,
            stock="charge",
            slot=held.slot,
            memcg=payers.path(held.memcg),
            memcg_address=held.memcg,
            objcg=None,
            node=None,
            charged=held.nr_pages * mem_map(image).page_size,
            reclaimable=None,
            unreclaimable=None,
            locked=None,
        )


def _obj_stocks(payers: Payers, stocks: Sequence[ObjStock]) -> Iterator[StockRow]:
    for held in stocks:
        memcg = payers.payer(held.objcg)
        yield StockRow(
            cpu=held.cpu,
            stock="object",
            slot=held.slot,
            memcg=payers.path(memcg),
            memcg_address=memcg,
            objcg=held.objcg,
            node=held.nid,
            charged=held.nr_bytes,
            reclaimable=held.reclaimable,
            unreclaimable=held.unreclaimable,
            locked=_NO_LOCK if held.locked is None else held.locked,
        )


def _run(image: Image, args: Namespace) -> Answer:
    return stock(image)


VIEW = View(
    name="stock",
    description="Lists the charge stock and the object stock of every CPU, and how far off "
    "counters can be because of them.",
    run=_run,
    records=(StockRow, BoundRow),
)
