# SPDX-License-Identifier: LGPL-2.1-or-later
"""Work items in memory made as kernel/workqueue.c fills it."""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.layouts import MadeImage

from memcg_inspect.linux.kernel.workqueue import is_pending, works_of

VARIABLES, AT = 0xFFFFFFFF82000000, 0xFFFF888000111000
MISSING = 0xFFFF888077700000
OURS, OTHER = 0xFFFFFFFF81000100, 0xFFFFFFFF81000200
POOL, WORKERS, WORKS = AT, AT + 0x1000, AT + 0x2000
QUEUE, PWQ = AT + 0x3000, AT + 0x4000


def machine(inactive: str = "inactive_works") -> MadeImage:
    """Return a machine without a pool or a work queue."""
    image = MadeImage()
    image.declare(
        """
        struct list_head { struct list_head *next; struct list_head *prev; };
        struct counter { long counter; };
        struct work_struct { struct counter data; struct list_head entry; void *func; };
        struct xarray { unsigned int lock; unsigned int flags; void *xa_head; };
        struct xa_node { void *head[5]; void *slots[64]; };
        struct idr { struct xarray idr_rt; unsigned int idr_base; };
        struct worker { struct list_head node; struct work_struct *current_work;
            void *current_func; struct list_head scheduled; };
        struct worker_pool { int cpu; struct list_head worklist; struct list_head workers; };
        struct workqueue_struct { struct list_head pwqs; struct list_head list; };
        """
        "struct pool_workqueue { int refcnt; struct list_head pwqs_node;"
        f" struct list_head {inactive}; }};"
    )
    image.variable("worker_pool_idr", "struct idr", VARIABLES)
    image.make("struct idr", VARIABLES, {})
    image.variable("workqueues", "struct list_head", VARIABLES + 64)
    linked(image, VARIABLES + 64)
    return image


def linked(image: MadeImage, head: int, *links: int) -> None:
    """Make a list."""
    ring = [head, *links]
    for number, link in enumerate(ring):
        image.words(link, ring[(number + 1) % len(ring)], ring[number - 1])


def work(image: MadeImage, number: int, function: int, data: int = 1) -> int:
    """Make a work item, and return the address of its link."""
    at = WORKS + 64 * number
    image.make("struct work_struct", at, {"data.counter": data, "func": function})
    return at + 8


def filled(image: MadeImage) -> None:
    """Put work items of two functions wherever work items can be."""
    image.words(VARIABLES + 8, POOL)
    items = [work(image, n, OURS if n % 2 == 0 else OTHER) for n in range(12)]
    image.make("struct worker_pool", POOL, {})
    linked(image, POOL + 8, items[0], items[1], items[2])
    linked(image, POOL + 24, WORKERS, WORKERS + 256, WORKERS + 512)
    for worker, (current, function) in enumerate(((4, OURS), (5, OTHER), (6, OURS))):
        at = WORKERS + 256 * worker
        # The last one has just ended its work item.
        image.words(at + 16, items[current] - 8 if worker < 2 else 0, function)
        linked(image, at + 32, *items[7 + worker : 8 + worker])
    linked(image, VARIABLES + 64, QUEUE + 16)
    linked(image, QUEUE, PWQ + 8)
    linked(image, PWQ + 24, items[10], items[11])


@pytest.mark.parametrize("inactive", ["inactive_works", "delayed_works"])
def test_work_items_are_found_wherever_they_wait_or_run(inactive: str) -> None:
    image, faults = machine(inactive), list[FaultError]()
    assert list(works_of(image, OURS, faults.append)) == []
    filled(image)
    for function, numbers in ((OURS, [0, 2, 4, 8, 10]), (OTHER, [1, 5, 7, 9, 11])):
        found = [work.value_() for work in works_of(image, function, faults.append)]
        assert sorted(found) == [WORKS + 64 * number for number in numbers]
        assert len(found) == 5
    assert list(works_of(image, 0, faults.append)) == []
    assert faults == []


#: A link that is broken, the work items that are found all the same, and where reads fail. Both the
#: link that cannot be read and what it is a member of are among these.
BROKEN = [
    (POOL + 8, [4, 8, 10], [0, 16]),
    (WORKERS + 32, [0, 2, 4, 8, 10], [0, 16]),
    (PWQ + 24, [0, 2, 4, 8], [0, 16]),
    (VARIABLES + 8, [10], [8, 24]),  # the pool itself
    (POOL + 24, [0, 2, 4, 8, 10], [0, 24]),  # the workers: they are walked from the other end
]


@pytest.mark.parametrize(("place", "found", "fails"), BROKEN)
def test_lists_that_are_broken(place: int, found: list[int], fails: list[int]) -> None:
    image, faults = machine(), list[FaultError]()
    filled(image)
    image.words(place, MISSING)
    if place in (POOL + 8, PWQ + 24):
        image.words(place + 8, MISSING)
    works = {work.value_() for work in works_of(image, OURS, faults.append)}
    assert works == {WORKS + 64 * number for number in found}
    assert sorted(fault.address - MISSING for fault in faults) == fails


def test_the_lowest_bit_tells_whether_a_work_item_waits() -> None:
    image = machine()
    for data, waits in ((0, False), (1, True), (0xFE, False), (0xFF01, True)):
        work(image, 0, OURS, data)
        assert is_pending(image.pointer("struct work_struct *", WORKS)[0]) == waits
