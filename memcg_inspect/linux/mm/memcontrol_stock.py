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
from typing import NamedTuple

from drgn import FaultError, Object, Type, TypeKind, sizeof
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.mm.mmzone import mem_map, possible_cpus
from memcg_inspect.linux.mm.percpu import largest_percpu_charge
from memcg_inspect.model import ChargeStock, Coverage, ObjStock

__all__ = (
    "Bound",
    "charge_stock_bound",
    "obj_stock_name",
    "objcg_bytes_bound",
    "read_charge_stocks",
    "read_obj_stocks",
    "slab_bytes_bound",
)


@per_image
def _stock(image: Image) -> tuple[str, bool]:
    # The object stock moved out of memcg_stock_pcp in 6.16, and got several slots in 7.2.
    for name in ("obj_stock", "memcg_stock"):
        try:
            type_ = image.object(name).type_
        except UnknownKernelError:
            continue
        if type_.has_member("cached_objcg"):
            return name, False
        if type_.has_member("cached") and name == "obj_stock":
            member = next(m for m in type_.unaliased().members or () if m.name == "cached")
            return name, member.type.unaliased_kind() == TypeKind.ARRAY
    raise UnknownKernelError("there is no object stock")


def obj_stock_name(image: Image) -> str:
    """Return the name of the per-CPU variable that is the object stock."""
    return _stock(image)[0]


def read_obj_stocks(image: Image, coverage: Coverage) -> list[ObjStock]:
    """Read the object stocks of all possible CPUs, slots without an objcg left out."""
    name, has_slots = _stock(image)
    stocks: list[ObjStock] = []
    for cpu in possible_cpus(image):
        try:
            stock = per_cpu(image.object(name), cpu).read_()
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


def read_charge_stocks(image: Image, coverage: Coverage) -> list[ChargeStock]:
    """Read the pages that all possible CPUs have charged in advance."""
    stocks: list[ChargeStock] = []
    for cpu in possible_cpus(image):
        try:
            stock = per_cpu(image.object("memcg_stock"), cpu).read_()
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


#: A macro, in pages; it was 32 up to 6.0.
MEMCG_CHARGE_BATCH = 64


class Bound(NamedTuple):
    """
    The most that one CPU's stock can hold of something.

    :ivar slots: how many amounts there are on a CPU
    :ivar each: bytes in one of them, at the most; ``None`` if that cannot be known
    :ivar rule: what makes it so
    """

    slots: int
    each: int | None
    rule: str


def _places(type_: Type) -> tuple[int, Type]:
    type_ = type_.unaliased()
    return (array_length(type_), type_.type) if type_.kind == TypeKind.ARRAY else (1, type_)


def charge_stock_bound(image: Image) -> Bound:
    """Return how much a CPU can have charged in advance: what goes beyond is given back."""
    # Several slots since 6.16.
    slots, _ = _places(member_type(image.object("memcg_stock").type_, "cached"))
    each = MEMCG_CHARGE_BATCH * mem_map(image).page_size
    return Bound(slots, each, f"{MEMCG_CHARGE_BATCH} pages: MEMCG_CHARGE_BATCH")


def objcg_bytes_bound(image: Image, coverage: Coverage) -> Bound:
    """Return how many bytes of charged pages a CPU can have that are not handed out."""
    slots, type_ = _places(member_type(image.object(obj_stock_name(image)).type_, "nr_bytes"))
    page_size = mem_map(image).page_size
    if sizeof(type_) == 2 or slots > 1:
        # 7.2: what does not fit into 16 bits is given back, also where the type is wider
        # since pages are.
        return Bound(slots, max(0xFFFF, page_size), "nr_bytes has 16 bits")
    # Before, what is left of the pages charged for an object is added to what was not enough
    # for it.
    largest = _largest_slab_charge(image, coverage)
    each = None
    if largest is not None:
        each = max(largest, largest_percpu_charge(image)) + page_size - 2
    return Bound(slots, each, "a page and the largest object, which may be a percpu one")


def slab_bytes_bound(image: Image, coverage: Coverage) -> Bound:
    """Return how many bytes a CPU can have that are in no counter of slab memory, each way."""
    type_ = member_type(image.object(obj_stock_name(image)).type_, "nr_slab_reclaimable_b")
    if sizeof(type_) == 2:  # 7.2
        return Bound(1, 0x7FFF, "nr_slab_*_b have 16 bits, one of them for the sign")
    largest = _largest_slab_charge(image, coverage)
    each = None if largest is None else max(largest, mem_map(image).page_size)
    return Bound(1, each, "a page, or the largest object: that is held back once")


def _largest_slab_charge(image: Image, coverage: Coverage) -> int | None:
    """The bytes charged for an object of the cache with the largest; ``None`` if not known."""
    largest, known = 0, True

    def missed(error: FaultError) -> None:
        nonlocal known
        known = False
        coverage.miss("list of slab caches", error.address, str(error))

    head = image.object("slab_caches").address_of_()
    for cache in list_entries("struct kmem_cache", head, "list", missed):
        try:
            largest = max(largest, int(cache.size))
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return largest + image.memory.word_size if known else None
