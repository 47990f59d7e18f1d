# SPDX-License-Identifier: LGPL-2.1-or-later
"""What every CPU has charged in advance, for whom, and how far that lets counters be off."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

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
from memcg_inspect.tables import Answer, Column, NotRead, Table, Value
from memcg_inspect.views.payers import Payers
from memcg_inspect.views.view import View

__all__ = ("VIEW", "stock")

COLUMNS = (
    Column("cpu", "number", "whose stock it is"),
    Column("stock", "text", "charge: whole pages; object: bytes of charged pages"),
    Column("slot", "number", "place in the stock"),
    Column("memcg", "memcg", "for whom"),
    Column("memcg_address", "address", "struct mem_cgroup *", shown=False),
    Column("objcg", "address", "struct obj_cgroup *, of an object stock"),
    Column("node", "node", "node of the slab bytes that are not booked yet"),
    Column("charged", "bytes", "charged to the memcg, and not handed out", total=True),
    Column("reclaimable", "bytes", "not booked yet as NR_SLAB_RECLAIMABLE_B", total=True),
    Column("unreclaimable", "bytes", "not booked yet as NR_SLAB_UNRECLAIMABLE_B", total=True),
    Column("locked", "flag", "whether the CPU was in the middle of using it", shown=False),
)


BOUND_COLUMNS = (
    Column("counter", "text", "the file, or the line of memory.stat, that is off"),
    Column("error", "text", "what is shown, held against what is used"),
    Column("slots", "count", "how many amounts a CPU can hold back; a memcg may have each of them"),
    Column("each", "bytes", "one of them, at the most"),
    Column("cpu_bound", "bytes", "the most that one CPU can hold back"),
    Column("bound", "bytes", "the most that all possible CPUs can hold back"),
    Column("held", "bytes", "what they do hold back, without signs"),
    Column("rule", "text", "where the limit is from"),
)


_LOCK_SAYS_NOTHING = NotRead("the lock of this kernel's stocks does not tell whether it is held")


def stock(image: Image) -> Answer:
    """Return what the stocks of all possible CPUs hold, and how much they can."""
    payers = Payers(image)
    charges = read_charge_stocks(image, payers.coverage["charge_stock"])
    objects = read_obj_stocks(image, payers.coverage["stock"])
    rows = sorted(
        [*_charge_stocks(image, payers, charges), *_obj_stocks(payers, objects)],
        key=lambda row: (row[0], row[1], row[2]),
    )
    tables = (
        Table("stock", "stocks of CPUs", COLUMNS, rows, empty="all stocks are empty"),
        Table(
            "bounds",
            "how far counters can be off",
            BOUND_COLUMNS,
            list(_bounds(image, payers, charges, objects)),
        ),
    )
    return Answer("stock", image_info(image), tables, dict(payers.coverage))


def _bounds(
    image: Image, payers: Payers, charges: Sequence[ChargeStock], objects: Sequence[ObjStock]
) -> Iterator[tuple[Value, ...]]:
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
        each: Value = NotRead("the largest slab cache is not known")
        on_cpu = everywhere = each
        if bound.each is not None:
            each, on_cpu = bound.each, bound.slots * bound.each
            everywhere = cpus * on_cpu
        yield (counter, error, bound.slots, each, on_cpu, everywhere, held, bound.rule)


def _charge_stocks(
    image: Image, payers: Payers, stocks: Sequence[ChargeStock]
) -> Iterator[tuple[Value, ...]]:
    size = mem_map(image).page_size
    for held in stocks:
        charged = held.nr_pages * size
        yield (
            held.cpu, "charge", held.slot, payers.path(held.memcg), held.memcg, None, None,
            charged, None, None, None,
        )  # fmt: skip


def _obj_stocks(payers: Payers, stocks: Sequence[ObjStock]) -> Iterator[tuple[Value, ...]]:
    for held in stocks:
        memcg = payers.payer(held.objcg)
        yield (
            held.cpu, "object", held.slot, payers.path(memcg), memcg, held.objcg, held.nid,
            held.nr_bytes, held.reclaimable, held.unreclaimable,
            _LOCK_SAYS_NOTHING if held.locked is None else held.locked,
        )  # fmt: skip


def _run(image: Image, args: Namespace) -> Answer:
    return stock(image)


VIEW = View(
    name="stock",
    help="what CPUs have charged in advance, for whom and for which node",
    description="Lists the charge stock and the object stock of every CPU, and how far they "
    "can let counters be off at the most.",
    run=_run,
)
