# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Instances of io_uring that are closed, or damaged, in memory made as io_uring/io_uring.c fills it.

tests/linux/test_layouts_counters.py has the layouts of all releases.
"""

from __future__ import annotations

import pytest
from drgn import offsetof
from support.layouts import FRAMES, MadeImage

from memcg_inspect.linux.io_uring.io_uring import FILE_OPERATIONS, io_uring_pages
from memcg_inspect.model import Coverage

VARIABLES, EXIT = 0xFFFFFFFF82000000, 0xFFFFFFFF81000100
CONTEXTS, ARRAYS, NODES = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888000333000
QUEUE, MISSING = 0xFFFF888000444000, 0xFFFF888077700000
STRUCTURES = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct hlist_node { struct hlist_node *next; struct hlist_node **pprev; };
    struct hlist_head { struct hlist_node *first; };
    struct counter { long counter; };
    struct work_struct { struct counter data; struct list_head entry; void *func; };
    struct xarray { unsigned int lock; unsigned int flags; void *xa_head; };
    struct xa_node { void *head[5]; void *slots[64]; };
    struct idr { struct xarray idr_rt; unsigned int idr_base; };
    struct worker_pool { int cpu; struct list_head worklist; struct list_head workers; };
    struct workqueue_struct { struct list_head pwqs; struct list_head list; };
    struct pool_workqueue { int refcnt; struct list_head pwqs_node;
        struct list_head inactive_works; };
    struct io_mapped_region { struct page **pages; void *ptr; unsigned int nr_pages; };
"""
#: Since 6.14; and 6.8, with rings of buffers that are kept.
NEW = """
    struct io_buffer_list { void *buf_ring; struct io_mapped_region region; };
    struct io_ring_ctx { void *rings; void *sq_sqes; struct io_mapped_region ring_region;
        struct io_mapped_region sq_region; struct io_mapped_region param_region;
        struct xarray io_bl_xa; struct work_struct exit_work; };
"""
OLD = """
    struct io_buffer_list { struct page **buf_pages; void *buf_ring; unsigned short buf_nr_pages;
        unsigned char is_mmap; };
    struct io_buf_free { struct hlist_node list; void *mem; unsigned long size; };
    struct io_ring_ctx { void *rings; void *sq_sqes; struct page **ring_pages;
        struct page **sqe_pages; struct io_buffer_list *io_bl; struct hlist_head io_buf_list;
        struct xarray io_bl_xa; struct work_struct exit_work; };
"""


def machine(structures: str = NEW) -> MadeImage:
    image = MadeImage()
    image.declare(STRUCTURES + structures)
    return image


def context(number: int) -> int:
    return CONTEXTS + 512 * number


def array(image: MadeImage, number: int) -> int:
    """Make an array with the page of a number, and return its address."""
    address = ARRAYS + 64 * number
    image.words(address, FRAMES.page(number), 0)
    return address


def pages(*numbers: int) -> list[int]:
    return [FRAMES.page(number) for number in numbers]


def found(image: MadeImage, *numbers: int) -> tuple[list[int], Coverage]:
    """Return the pages of the instances of some files, and what is unreadable."""
    coverage = Coverage()
    return sorted(io_uring_pages(image, map(context, numbers), coverage)), coverage


def test_all_regions_of_an_instance() -> None:
    """Also those of provided buffers, each in an array of its pages."""
    image = machine()
    names = ("ring_region.pages", "sq_region.pages", "param_region.pages")
    members = {name: array(image, n) for n, name in enumerate(names, 1)}
    lists = [NODES + 0x1000 + 64 * n for n in range(3)]
    for n, one in enumerate(lists[:2], 4):
        image.make("struct io_buffer_list", one, {"region.pages": array(image, n)})
    image.make("struct io_buffer_list", lists[2], {})  # of user space
    image.make("struct xa_node", NODES, {})
    image.words(NODES + 40, *lists)
    image.make("struct io_ring_ctx", context(0), members | {"io_bl_xa.xa_head": NODES + 2})
    assert found(image, 0) == (pages(1, 2, 3, 4, 5), Coverage())


def test_an_array_without_a_page() -> None:
    image = machine()
    image.words(ARRAYS, 0)
    members = {"ring_region.pages": ARRAYS, "sq_region.pages": array(image, 2)}
    image.make("struct io_ring_ctx", context(0), members)
    assert found(image, 0) == (pages(2), Coverage())


def test_an_instance_that_is_not_in_the_image() -> None:
    """Those after it are read all the same."""
    image = machine()
    image.make("struct io_ring_ctx", context(1), {"ring_region.pages": array(image, 1)})
    image.make("struct io_ring_ctx", context(2), {"ring_region.pages": MISSING})
    image.make("struct io_ring_ctx", context(3), {"ring_region.pages": array(image, 3)})
    assert FRAMES.page(1) != FRAMES.page(3)
    got, coverage = found(image, 1, 2, 3)
    assert got == pages(1, 3)
    assert coverage.unreadable == 1
    [missed] = coverage.examples
    assert (missed.what, missed.address) == ("rings of io_uring", MISSING)
    assert "not made" in missed.reason


def test_groups_of_provided_buffers_in_an_array() -> None:
    """Until 6.8, the first 64 of them."""
    image = machine(OLD)
    groups, size = NODES, image.type("struct io_buffer_list").size or 0
    for number in range(66):
        image.make("struct io_buffer_list", groups + size * number, {})
    ring = FRAMES.virt(FRAMES.page(1))
    image.make("struct io_buffer_list", groups, {"buf_ring": ring, "is_mmap": 1})
    for number in (63, 64):
        members = {"buf_pages": array(image, number), "buf_nr_pages": 1}
        image.make("struct io_buffer_list", groups + size * number, members)
    image.make("struct io_ring_ctx", context(0), {"io_bl": groups})
    assert found(image, 0) == (pages(1, 63), Coverage())


def test_rings_of_buffers_that_are_kept() -> None:
    """If the list is damaged, what is before the damage is found."""
    image = machine(OLD)
    first = NODES + 0x1000
    mem = FRAMES.virt(FRAMES.page(1))
    image.make("struct io_buf_free", first, {"mem": mem, "list.next": MISSING})
    image.make("struct io_ring_ctx", context(0), {"io_buf_list.first": first})
    got, coverage = found(image, 0)
    assert got == pages(1)
    assert {missed.what for missed in coverage.examples} == {"rings of io_uring"}


@pytest.mark.parametrize("has_work", [True, False])
def test_an_instance_whose_file_was_released(has_work: bool) -> None:
    """A work item waits for its requests."""
    image = machine()
    if has_work:
        image.symbol_at("io_ring_exit_work", EXIT)
    image.variable("worker_pool_idr", "struct idr", VARIABLES)
    image.make("struct idr", VARIABLES, {})
    image.variable("workqueues", "struct list_head", VARIABLES + 64)
    image.make("struct io_ring_ctx", context(1), {"ring_region.pages": array(image, 1)})
    work = context(1) + offsetof(image.type("struct io_ring_ctx"), "exit_work")
    image.make("struct work_struct", work, {"func": EXIT})
    for head, link in (
        (VARIABLES + 64, QUEUE + 16),
        (QUEUE, QUEUE + 256 + 8),
        (QUEUE + 256 + 24, work + 8),
    ):
        image.words(head, link, link)
        image.words(link, head, head)
    image.make("struct io_ring_ctx", context(0), {"ring_region.pages": array(image, 2)})
    assert found(image, 0) == (pages(1, 2) if has_work else pages(2), Coverage())
    if has_work:
        image.words(QUEUE + 256 + 24, MISSING, MISSING)
        got, coverage = found(image, 0)
        assert got == pages(2)
        assert {missed.what for missed in coverage.examples} == {"rings of io_uring"}


def test_a_kernel_without_io_uring() -> None:
    assert list(io_uring_pages(MadeImage(), [context(0)], Coverage())) == []
    assert FILE_OPERATIONS == "io_uring_fops"
