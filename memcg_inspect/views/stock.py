# SPDX-License-Identifier: LGPL-2.1-or-later
"""What every CPU has charged in advance, for whom, and how far that lets counters be off."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from drgn import Program

from memcg_inspect.linux.image import image_info
from memcg_inspect.linux.mmzone import mem_map
from memcg_inspect.linux.stock import read_charge_stocks, read_obj_stocks
from memcg_inspect.tables import Answer, Column, Table, Value
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


def stock(prog: Program) -> Answer:
    """Return what the stocks of all possible CPUs hold."""
    payers = Payers(prog)
    rows = sorted(
        [*_charge_stocks(prog, payers), *_obj_stocks(prog, payers)],
        key=lambda row: (row[0], row[1], row[2]),
    )
    table = Table("stock", "stocks of CPUs", COLUMNS, rows, empty="all stocks are empty")
    return Answer("stock", image_info(prog), (table,), dict(payers.coverage))


def _charge_stocks(prog: Program, payers: Payers) -> Iterator[tuple[Value, ...]]:
    size = mem_map(prog).page_size
    slots: dict[int, int] = {}
    for held in read_charge_stocks(prog, payers.coverage["charge_stock"]):
        slot = slots[held.cpu] = slots.get(held.cpu, -1) + 1
        charged = held.nr_pages * size
        yield (
            held.cpu, "charge", slot, payers.path(held.memcg), held.memcg, None, None,
            charged, None, None, None,
        )  # fmt: skip


def _obj_stocks(prog: Program, payers: Payers) -> Iterator[tuple[Value, ...]]:
    for held in read_obj_stocks(prog, payers.coverage["stock"]):
        memcg = payers.payer(held.objcg)
        yield (
            held.cpu, "object", held.slot, payers.path(memcg), memcg, held.objcg, held.nid,
            held.nr_bytes, held.reclaimable, held.unreclaimable, held.locked,
        )  # fmt: skip


def _run(prog: Program, args: Namespace) -> Answer:
    return stock(prog)


VIEW = View(
    name="stock",
    help="what CPUs have charged in advance, for whom and for which node",
    description="Lists the charge stock and the object stock of every CPU.",
    run=_run,
)
