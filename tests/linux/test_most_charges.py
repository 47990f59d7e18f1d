# SPDX-License-Identifier: LGPL-2.1-or-later
"""The most that one operation charges, and the most that the stocks of a CPU hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from drgn import Program, sizeof
from drgn.helpers.linux.list import list_for_each_entry
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_limits import read_limits
from memcg_inspect.linux.mm.memcontrol_stock import (
    charge_stock_bound,
    largest_slab_charge,
    objcg_bytes_bound,
    slab_bytes_bound,
)
from memcg_inspect.model import Coverage

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]
KERNEL = pytest.mark.parametrize("kernel", DEBIAN_KERNELS)

PAGE, CPUS = 4096, 4
#: MAX_PAGE_ORDER is 10.
BLOCK = 1 << 10
#: PCPU_MIN_UNIT_SIZE for each CPU, and a pointer for each 4 bytes of a unit.
PERCPU = (32 << 10) * CPUS + (32 << 10) // 4 * 8


def cache_sizes(prog: Program) -> list[int]:
    caches = list_for_each_entry("struct kmem_cache", prog["slab_caches"].address_of_(), "list")
    return [int(cache.size) for cache in caches]


def without_a_cache(core: Path) -> Program:
    """Return a program in which one slab cache, that is not the first, cannot be read."""
    prog = opened(core)
    head = prog["slab_caches"].address_of_()
    cache = list(list_for_each_entry("struct kmem_cache", head, "list"))[1]
    prog.add_memory_segment(cache.size.address_ or 0, sizeof(cache.size), excluded, False)
    return prog


def has_16_bits(prog: Program) -> bool:
    """Return whether the stock of objects has several slots, and counters of 16 bits (7.2)."""
    try:
        return bool(prog["obj_stock"].type_.has_member("index"))
    except KeyError:
        return False


@KERNEL
def test_the_most_that_one_operation_charges(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").program()
    limits, largest = read_limits(image_of(prog)), max(cache_sizes(prog)) + 8
    assert limits.charge_batch == 64
    assert limits.folio_batch == (31 if prog.type("struct folio_batch").size > 15 * 8 + 8 else 15)
    assert limits.block == BLOCK
    assert limits.stack == 16 << 10
    assert limits.slab_object == largest > PAGE
    assert limits.slab_stock == (0x7FFF if has_16_bits(prog) else largest)
    assert limits.percpu == PERCPU
    # Only with the mount option memory_hugetlb_accounting
    assert limits.hugetlb == ()


@KERNEL
def test_any_object_may_be_as_large_as_a_block(lab: Lab, kernel: str) -> None:
    """That is if the caches cannot be read."""
    image = lab.image(kernel, "4", "mixed")
    prog = opened(image.core)
    prog.add_memory_segment(prog["slab_caches"].address_ or 0, 16, excluded, False)
    limits = read_limits(image_of(prog))
    assert limits.slab_object == BLOCK * PAGE
    assert limits.slab_stock == (0x7FFF if has_16_bits(prog) else BLOCK * PAGE)


@KERNEL
def test_what_stocks_hold(lab: Lab, kernel: str) -> None:
    """refill_stock(), refill_obj_stock() and mod_objcg_state() of mm/memcontrol.c."""
    prog = lab.image(kernel, "4", "mixed").program()
    image, coverage = image_of(prog), Coverage()
    pages, objects = charge_stock_bound(image), objcg_bytes_bound(image, coverage)
    slabs = slab_bytes_bound(image, coverage)
    assert (pages.each, pages.rule) == (64 * PAGE, "64 pages: MEMCG_CHARGE_BATCH")
    stock = prog["memcg_stock"].type_
    assert pages.slots == (1 if stock.has_member("stock_lock") else 7)
    if has_16_bits(prog):
        assert objects == (5, 0xFFFF, "nr_bytes has 16 bits")
        assert slabs == (1, 0x7FFF, "nr_slab_*_b have 16 bits, one of them for the sign")
        assert (coverage.read, coverage.unreadable) == (0, 0)
        return
    # A page but one byte is left of the last charge, and too few bytes for the largest object.
    words = "a page and the largest object, which may be a percpu one"
    assert objects == (1, PERCPU + PAGE - 2, words)
    words = "a page, or the largest object: that is held back once"
    assert slabs == (1, max(cache_sizes(prog)) + 8, words)
    assert (coverage.read, coverage.unreadable) == (2 * len(cache_sizes(prog)), 0)


@KERNEL
def test_a_cache_that_cannot_be_read_may_have_the_largest_objects(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    sizes, coverage = cache_sizes(image.program()), Coverage()
    assert largest_slab_charge(image_of(image.program()), coverage) == max(sizes) + 8
    assert (coverage.read, coverage.unreadable) == (len(sizes), 0)
    missed = Coverage()
    prog = without_a_cache(image.core)
    assert largest_slab_charge(image_of(prog), missed) is None
    assert (missed.read, missed.unreadable) == (len(sizes) - 1, 1)
    if not has_16_bits(prog):
        assert slab_bytes_bound(image_of(prog), missed).each is None
        assert objcg_bytes_bound(image_of(prog), missed).each is None
