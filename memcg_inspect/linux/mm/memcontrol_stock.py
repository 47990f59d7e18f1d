# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Per-CPU stocks of charges
-------------------------

Mirrors ``struct memcg_stock_pcp`` and ``struct obj_stock_pcp`` of :linux:`mm/memcontrol.c`. Each
CPU has two stocks:

- the charge stock holds pages that are charged to a memcg in advance;
- the object stock holds bytes of charged pages that no object uses yet (``nr_bytes``), and
  changes of ``NR_SLAB_RECLAIMABLE_B`` and ``NR_SLAB_UNRECLAIMABLE_B`` that are not added to the
  counters yet (``nr_slab_*_b``).

This module reads the stocks, and says how much they can hold at the most.

What differs between kernel releases:

- up to 6.15, the object stock is a part of ``struct memcg_stock_pcp``; since 6.16 it is the
  per-CPU variable ``obj_stock``;
- since 6.16, the charge stock has several slots;
- since 7.2, the object stock has several slots. The slab bytes belong to one of them
  (``index``), ``nr_slab_*_b`` are 16 bits wide, and ``nr_bytes`` holds at most 16 bits;
- since 6.15, a stock's lock tells whether it is held (``local_trylock_t``).
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
    "largest_slab_charge",
    "obj_stock_name",
    "objcg_bytes_bound",
    "read_charge_stocks",
    "read_obj_stocks",
    "slab_bytes_bound",
)


#: A macro of :linux:`include/linux/memcontrol.h`, in pages. It was 32 up to 6.0.
MEMCG_CHARGE_BATCH = 64


@per_image
def _obj_stock(image: Image) -> tuple[str, bool]:
    """Return the name of the per-CPU object stock, and whether it has several slots."""
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
    """
    Return the name of the per-CPU variable that holds the object stock.

    :raises UnknownKernelError: if the kernel has no object stock
    """
    return _obj_stock(image)[0]


def read_obj_stocks(image: Image, coverage: Coverage) -> list[ObjStock]:
    """
    Read the object stocks of all possible CPUs.

    :param coverage: counts the CPUs whose stocks were read, and those that are unreadable
    :return: one record for each slot that has an objcg
    """
    name, has_slots = _obj_stock(image)
    stocks: list[ObjStock] = []
    for cpu in possible_cpus(image):
        try:
            stock = per_cpu(image.object(name), cpu).read_()
            stocks += _slots(stock, cpu) if has_slots else _single_slot(stock, cpu)
            coverage.read += 1
        except FaultError as error:
            coverage.miss(f"object stock of CPU {cpu}", error.address, str(error))
    return stocks


def _locked(stock: Object) -> bool | None:
    # A local_trylock_t records that it is held, a local_lock_t (up to 6.14) does not.
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


def _single_slot(stock: Object, cpu: int) -> Iterator[ObjStock]:
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
    """
    Read the charge stocks of all possible CPUs.

    :param coverage: counts the CPUs whose stocks were read, and those that are unreadable
    :return: one record for each slot that has a memcg. Up to 6.15, a slot keeps its memcg, and a
        reference to it, when its last page is used.
    """
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
            if memcg
        ]
    return stocks


class Bound(NamedTuple):
    """
    The most that the stock of one CPU can hold.

    :ivar slots: number of slots that hold such an amount
    :ivar each: the most that one slot can hold, in bytes; ``None`` if it is not known
    :ivar rule: the limit in the kernel, in words
    """

    slots: int
    each: int | None
    rule: str


def _slots_of(type_: Type) -> tuple[int, Type]:
    """Return the number of slots of a member of a stock, and the type of each."""
    type_ = type_.unaliased()
    return (array_length(type_), type_.type) if type_.kind == TypeKind.ARRAY else (1, type_)


def charge_stock_bound(image: Image) -> Bound:
    """
    Return how much the charge stock of a CPU can hold.

    Mirrors ``refill_stock()``, which uncharges what exceeds ``MEMCG_CHARGE_BATCH``.
    """
    slots, _ = _slots_of(member_type(image.object("memcg_stock").type_, "cached"))
    each = MEMCG_CHARGE_BATCH * mem_map(image).page_size
    return Bound(slots, each, f"{MEMCG_CHARGE_BATCH} pages: MEMCG_CHARGE_BATCH")


def objcg_bytes_bound(image: Image, coverage: Coverage) -> Bound:
    """
    Return how much ``nr_bytes`` of the object stock of a CPU can be.

    Mirrors ``__refill_obj_stock()`` (``refill_obj_stock()`` on older kernels).

    :param coverage: counts the slab caches that were read, and those that are unreadable
    """
    slots, type_ = _slots_of(member_type(image.object(obj_stock_name(image)).type_, "nr_bytes"))
    page_size = mem_map(image).page_size
    if sizeof(type_) == 2 or slots > 1:
        # Since 7.2, pages are uncharged if nr_bytes exceeds U16_MAX, even where the member is
        # 32 bits wide because PAGE_SIZE does not fit into 16 bits.
        return Bound(slots, max(0xFFFF, page_size), "nr_bytes has 16 bits")
    # Before, obj_cgroup_charge() added the remainder of the pages charged for an object to
    # bytes that were too few for that object, and uncharged nothing.
    largest = largest_slab_charge(image, coverage)
    each = None
    if largest is not None:
        each = max(largest, largest_percpu_charge(image)) + page_size - 2
    return Bound(slots, each, "a page and the largest object, which may be a percpu one")


def slab_bytes_bound(image: Image, coverage: Coverage) -> Bound:
    """
    Return how much ``nr_slab_*_b`` of the object stock of a CPU can be, positive or negative.

    Mirrors ``__account_obj_stock()`` (``mod_objcg_state()`` on older kernels).

    :param coverage: counts the slab caches that were read, and those that are unreadable
    """
    type_ = member_type(image.object(obj_stock_name(image)).type_, "nr_slab_reclaimable_b")
    if sizeof(type_) == 2:  # since 7.2
        return Bound(1, 0x7FFF, "nr_slab_*_b have 16 bits, one of them for the sign")
    largest = largest_slab_charge(image, coverage)
    each = None if largest is None else max(largest, mem_map(image).page_size)
    return Bound(1, each, "a page, or the largest object: that is held back once")


def largest_slab_charge(image: Image, coverage: Coverage) -> int | None:
    """
    Return the most bytes charged for one slab object: its size and a pointer to its objcg.

    :return: ``None`` if not all caches could be read
    """
    largest, known = 0, True

    def missed(error: FaultError) -> None:
        nonlocal known
        known = False
        coverage.miss("list of slab caches", error.address, str(error))

    head = image.object("slab_caches").address_of_()
    for cache in list_entries(image, "struct kmem_cache", head, "list", missed):
        try:
            largest = max(largest, int(cache.size))
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return largest + image.memory.word_size if known else None
