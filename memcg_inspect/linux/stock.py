# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-CPU stocks of charges
-------------------------

Mirrors ``struct memcg_stock_pcp`` and ``struct obj_stock_pcp`` of
:linux:`mm/memcontrol.c`: pages charged in advance, bytes left over of charged pages, and
changes of the slab counters that were not booked yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, Program, TypeKind
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.linux.layout import per_program
from memcg_inspect.linux.mmzone import possible_cpus
from memcg_inspect.model import ChargeStock, Coverage, ObjStock

__all__ = ("obj_stock_name", "read_charge_stocks", "read_obj_stocks")


@per_program
def _stock(prog: Program) -> tuple[str, bool]:
    # The object stock moved out of memcg_stock_pcp in 6.16, and got several slots in 7.2.
    for name in ("obj_stock", "memcg_stock"):
        try:
            type_ = prog[name].type_
        except KeyError:
            continue
        if type_.has_member("cached_objcg"):
            return name, False
        if type_.has_member("cached") and name == "obj_stock":
            member = next(m for m in type_.unaliased().members or () if m.name == "cached")
            return name, member.type.unaliased_kind() == TypeKind.ARRAY
    raise LookupError("there is no object stock in this kernel")


def obj_stock_name(prog: Program) -> str:
    """Return the name of the per-CPU variable that is the object stock."""
    return _stock(prog)[0]


def read_obj_stocks(prog: Program, coverage: Coverage) -> list[ObjStock]:
    """Read the object stocks of all possible CPUs, slots without an objcg left out."""
    name, has_slots = _stock(prog)
    stocks: list[ObjStock] = []
    for cpu in possible_cpus(prog):
        try:
            stock = per_cpu(prog[name], cpu).read_()
            stocks += _slots(stock, cpu) if has_slots else _single(stock, cpu)
            coverage.read += 1
        except FaultError as error:
            coverage.miss(f"object stock of CPU {cpu}", error.address, str(error))
    return stocks


def _locked(stock: Object) -> bool | None:
    # local_trylock_t says whether it is held (6.15); a local_lock_t says nothing.
    for member in ("lock", "stock_lock"):
        try:
            return bool(stock.member_(member).acquired)
        except (AttributeError, LookupError):
            continue
    return None


def _slots(stock: Object, cpu: int) -> Iterator[ObjStock]:
    owner, locked = int(stock.index), _locked(stock)
    for slot, objcg in enumerate(stock.cached):
        if not objcg:
            continue
        owns = slot == owner
        yield ObjStock(
            cpu=cpu,
            slot=slot,
            objcg=objcg.value_(),
            nr_bytes=int(stock.nr_bytes[slot]),
            nid=int(stock.node_id) if owns else None,
            reclaimable=int(stock.nr_slab_reclaimable_b) if owns else 0,
            unreclaimable=int(stock.nr_slab_unreclaimable_b) if owns else 0,
            locked=locked,
        )


def _single(stock: Object, cpu: int) -> Iterator[ObjStock]:
    if not stock.cached_objcg:
        return
    pgdat = stock.cached_pgdat
    yield ObjStock(
        cpu=cpu,
        slot=0,
        objcg=stock.cached_objcg.value_(),
        nr_bytes=int(stock.nr_bytes),
        nid=int(pgdat.node_id) if pgdat else None,
        reclaimable=int(stock.nr_slab_reclaimable_b),
        unreclaimable=int(stock.nr_slab_unreclaimable_b),
        locked=_locked(stock),
    )


def read_charge_stocks(prog: Program, coverage: Coverage) -> list[ChargeStock]:
    """Read the pages that all possible CPUs have charged in advance."""
    stocks: list[ChargeStock] = []
    for cpu in possible_cpus(prog):
        try:
            stock = per_cpu(prog["memcg_stock"], cpu).read_()
        except FaultError as error:
            coverage.miss(f"charge stock of CPU {cpu}", error.address, str(error))
            continue
        coverage.read += 1
        if stock.cached.type_.unaliased_kind() == TypeKind.ARRAY:  # since 6.16
            pairs = list(zip(stock.cached, stock.nr_pages, strict=True))
        else:
            pairs = [(stock.cached, stock.nr_pages)]
        stocks += [
            ChargeStock(cpu, memcg.value_(), int(nr_pages), slot)
            for slot, (memcg, nr_pages) in enumerate(pairs)
            if memcg and nr_pages
        ]
    return stocks
