# SPDX-License-Identifier: LGPL-2.1-or-later
"""The most that one operation charges, from types and variables made by hand."""

from __future__ import annotations

import pytest
from support.layouts import MadeImage

from memcg_inspect.linux.mm.memcontrol_limits import read_limits
from memcg_inspect.model_kernel import Limits

VARIABLES, CACHE = 0xFFFFFFFF82000000, 0xFFFF888031000000
#: ``CGRP_ROOT_MEMORY_HUGETLB_ACCOUNTING``
HUGETLB = 1 << 5


def kernel(*, caches: bool = True) -> MadeImage:
    """Return a kernel with blocks of up to 16 pages, folio batches of 31, and one slab cache."""
    image = MadeImage()
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct zone { unsigned long free_area[5]; };
        struct folio_batch { unsigned char nr; void *folios[31]; };
        struct kmem_cache { unsigned int size; struct list_head list; };
        struct memcg_stock_pcp {
            struct mem_cgroup *cached; struct obj_cgroup *cached_objcg; int nr_slab_reclaimable_b;
        };
        struct hstate { unsigned int order; };
        struct cgroup_root { unsigned int flags; };
        """
    )
    image.variable("memcg_stock", "struct memcg_stock_pcp", 0x1000)
    image.variable("slab_caches", "struct list_head", VARIABLES)
    image.make("struct kmem_cache", CACHE, {"size": 8192})
    ring = [VARIABLES, CACHE + 8] if caches else [VARIABLES, 0xFFFF888077700000]
    for n, link in enumerate(ring[: 2 if caches else 1]):
        image.words(link, ring[1 - n], ring[1 - n])
    return image


def with_hugetlb(*orders: int, flags: int = HUGETLB, number: int | None = None) -> MadeImage:
    """Return a kernel that has huge pages and charges a memcg for them first (6.7 to 6.13)."""
    image = kernel()
    image.enum(None, CGRP_ROOT_MEMORY_HUGETLB_ACCOUNTING=HUGETLB)
    image.symbol_at("mem_cgroup_hugetlb_try_charge", VARIABLES + 4096)
    image.variable("cgrp_dfl_root", "struct cgroup_root", VARIABLES + 64)
    image.make("struct cgroup_root", VARIABLES + 64, {"flags": flags})
    image.variable("hugetlb_max_hstate", "int", VARIABLES + 128)
    image.variable("hstates", "struct hstate[16]", VARIABLES + 192)
    image.write(VARIABLES + 128, bytes([len(orders) if number is None else number]))
    for n, order in enumerate(orders):
        image.make("struct hstate", VARIABLES + 192 + 4 * n, {"order": order})
    return image


def test_the_most_of_each_operation() -> None:
    # A percpu allocation of 32 KiB on two CPUs, with a pointer for each 4 bytes.
    percpu = 2 * (32 << 10) + (32 << 10) // 4 * 8
    assert read_limits(kernel()) == Limits(
        charge_batch=64,
        folio_batch=31,
        block=16,
        stack=8 * 4096,
        slab_object=8200,
        slab_stock=8200,
        percpu=percpu,
        hugetlb=(),
    )


def test_caches_that_are_not_in_the_image() -> None:
    """An object may have a whole block."""
    limits = read_limits(kernel(caches=False))
    assert limits.slab_object == limits.slab_stock == 16 * 4096


@pytest.mark.parametrize("name", ["stack", "task"])
def test_stacks_of_tasks(name: str) -> None:
    image = kernel()
    image.symbol_at(f"__start_init_{name}", VARIABLES + 0x10000)
    image.symbol_at(f"__end_init_{name}", VARIABLES + 0x14000)
    assert read_limits(image).stack == 0x4000


def test_huge_pages_that_are_charged_before_there_is_one() -> None:
    """Only with memory_hugetlb_accounting, and where their sizes are known."""
    assert read_limits(with_hugetlb(9, 18)).hugetlb == (1 << 9, 1 << 18)
    assert read_limits(with_hugetlb(9, 18, flags=0)).hugetlb == ()
    assert read_limits(with_hugetlb(9, 18, number=99)).hugetlb == ()
    image = with_hugetlb(9)
    del image._symbols["mem_cgroup_hugetlb_try_charge"]
    assert read_limits(image).hugetlb == ()
    image = with_hugetlb(9)
    del image._objects["hstates"]
    assert read_limits(image).hugetlb == ()
