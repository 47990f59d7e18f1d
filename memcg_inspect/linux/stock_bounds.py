# SPDX-License-Identifier: LGPL-2.1-or-later
"""
How much a stock may hold
-------------------------

Mirrors the limits in ``refill_stock()``, ``refill_obj_stock()`` and ``mod_objcg_state()`` (since
7.2 ``__account_obj_stock()``) of :linux:`mm/memcontrol.c`.
"""

from __future__ import annotations

from typing import NamedTuple

from drgn import FaultError, Program, Type, TypeKind, sizeof

from memcg_inspect.linux.layout import array_length, member_type
from memcg_inspect.linux.list import list_entries
from memcg_inspect.linux.memory import memory_of
from memcg_inspect.linux.mmzone import mem_map
from memcg_inspect.linux.percpu import largest_percpu_charge
from memcg_inspect.linux.stock import obj_stock_name
from memcg_inspect.model import Coverage

__all__ = ("Bound", "charge_stock_bound", "objcg_bytes_bound", "slab_bytes_bound")

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


def _slots(type_: Type) -> tuple[int, Type]:
    type_ = type_.unaliased()
    return (array_length(type_), type_.type) if type_.kind == TypeKind.ARRAY else (1, type_)


def charge_stock_bound(prog: Program) -> Bound:
    """Return how much a CPU can have charged in advance: what goes beyond is given back."""
    # Several slots since 6.16.
    slots, _ = _slots(member_type(prog["memcg_stock"].type_, "cached"))
    each = MEMCG_CHARGE_BATCH * mem_map(prog).page_size
    return Bound(slots, each, f"{MEMCG_CHARGE_BATCH} pages: MEMCG_CHARGE_BATCH")


def objcg_bytes_bound(prog: Program, coverage: Coverage) -> Bound:
    """Return how many bytes of charged pages a CPU can have that are not handed out."""
    slots, type_ = _slots(member_type(prog[obj_stock_name(prog)].type_, "nr_bytes"))
    page_size = mem_map(prog).page_size
    if sizeof(type_) == 2 or slots > 1:
        # 7.2: what does not fit into 16 bits is given back, also where the type is wider
        # since pages are.
        return Bound(slots, max(0xFFFF, page_size), "nr_bytes has 16 bits")
    # Before, what is left of the pages charged for an object is added to what was not enough
    # for it.
    largest = _largest_slab_charge(prog, coverage)
    each = None
    if largest is not None:
        each = max(largest, largest_percpu_charge(prog)) + page_size - 2
    return Bound(slots, each, "a page and the largest object, which may be a percpu one")


def slab_bytes_bound(prog: Program, coverage: Coverage) -> Bound:
    """Return how many bytes a CPU can have that are in no counter of slab memory, each way."""
    type_ = member_type(prog[obj_stock_name(prog)].type_, "nr_slab_reclaimable_b")
    if sizeof(type_) == 2:  # 7.2
        return Bound(1, 0x7FFF, "nr_slab_*_b have 16 bits, one of them for the sign")
    largest = _largest_slab_charge(prog, coverage)
    each = None if largest is None else max(largest, mem_map(prog).page_size)
    return Bound(1, each, "a page, or the largest object: that is held back once")


def _largest_slab_charge(prog: Program, coverage: Coverage) -> int | None:
    """The bytes charged for an object of the cache with the largest; ``None`` if not known."""
    largest, known = 0, True

    def missed(error: FaultError) -> None:
        nonlocal known
        known = False
        coverage.miss("list of slab caches", error.address, str(error))

    head = prog["slab_caches"].address_of_()
    for cache in list_entries("struct kmem_cache", head, "list", missed):
        try:
            largest = max(largest, int(cache.size))
            coverage.read += 1
        except FaultError as error:
            missed(error)
    return largest + memory_of(prog).word_size if known else None
