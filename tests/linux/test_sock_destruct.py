# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sockets that are being freed, in memory made as net/core/sock.c and sock_diag.c fill it."""

from __future__ import annotations

from collections import Counter

import pytest
from drgn import FaultError, offsetof
from support.layouts import MadeImage

from memcg_inspect.linux.net.sock_destruct import (
    SockUse,
    broadcast_sockets,
    closing_sockets,
    deferred_sockets,
    freed_sockets,
)

VARIABLES, DATA, TEXT = 0xFFFFFFFF82000000, 0xFFFF888030000000, 0xFFFFFFFF81000000
SOCKS, WORKS, QUEUE = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888000333000
MISSING = 0xFFFF888077700000
#: Memcgs. The last one is not asked for.
ONE, TWO, OTHER = 0xFFFF888000444000, 0xFFFF888000555000, 0xFFFF888000666000
DESTRUCT, BROADCAST = "__sk_destruct", "sock_diag_broadcast_destroy_work"
FREE = ("sk_free", "__sk_free", "sk_destruct", DESTRUCT, "sock_diag_broadcast_destroy", BROADCAST)
QUEUES = ("queue_work_on", "__queue_work", "insert_work")
CALLS = ("call_rcu", "__call_rcu_common")
STRUCTURES = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct callback_head { struct callback_head *next; void *func; };
    struct rcu_segcblist { struct callback_head *head; void *tails[4]; };
    struct rcu_data { long gp_seq; struct rcu_segcblist cblist; };
    struct counter { long counter; };
    struct work_struct { struct counter data; struct list_head entry; void *func; };
    struct xarray { unsigned int lock; unsigned int flags; void *xa_head; };
    struct xa_node { void *head[5]; void *slots[64]; };
    struct idr { struct xarray idr_rt; unsigned int idr_base; };
    struct worker { struct list_head node; struct work_struct *current_work;
        void *current_func; struct list_head scheduled; };
    struct worker_pool { int cpu; struct list_head worklist; struct list_head workers; };
    struct workqueue_struct { struct list_head pwqs; struct list_head list; };
    struct pool_workqueue { int refcnt; struct list_head pwqs_node;
        struct list_head inactive_works; };
    struct sock { int family; int sk_wmem_alloc; struct mem_cgroup *sk_memcg;
        struct callback_head sk_rcu; };
"""
LISTENERS = "struct broadcast_sk { struct sock *sk; struct work_struct work; };"


def machine(listeners: bool = True) -> MadeImage:
    """
    Return a machine in which nothing waits.

    :param listeners: whether the kernel tells listeners of sockets that are closed
    """
    image = MadeImage()
    image.declare(STRUCTURES + (LISTENERS if listeners else ""))
    for number, name in enumerate((*FREE, *QUEUES, *CALLS)):
        if listeners or name != BROADCAST:
            image.symbol_at(name, TEXT + 16 * number, 2)
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, DATA, DATA + 0x100000)
    image.variable("rcu_data", "struct rcu_data", 0x10000)
    for cpu in (0, 1):
        image.make("struct rcu_data", DATA + 0x100000 * cpu + 0x10000, {})
    image.variable("worker_pool_idr", "struct idr", VARIABLES + 64)
    image.make("struct idr", VARIABLES + 64, {})
    image.variable("workqueues", "struct list_head", VARIABLES + 128)
    image.make("struct workqueue_struct", QUEUE, {})
    image.make("struct pool_workqueue", QUEUE + 256, {})
    linked(image, VARIABLES + 128, QUEUE + 16)
    linked(image, QUEUE, QUEUE + 256 + 8)
    linked(image, QUEUE + 256 + 24)
    return image


def linked(image: MadeImage, head: int, *links: int) -> None:
    """Make a list."""
    ring = [head, *links]
    for number, link in enumerate(ring):
        image.words(link, ring[(number + 1) % len(ring)], ring[number - 1])


def place(*names: str) -> set[int]:
    """Return all addresses in some functions."""
    numbers = map((*FREE, *QUEUES, *CALLS).index, names)
    return {TEXT + 16 * number + byte for number in numbers for byte in (0, 1)}


def sock(image: MadeImage, number: int, memcg: int, in_use: int = 0) -> int:
    """Make a socket."""
    address = SOCKS + 64 * number
    members = {"sk_memcg": memcg, "sk_wmem_alloc": in_use}
    image.make("struct sock", address, members)
    return address


def callbacks(image: MadeImage, cpu: int, *queued: tuple[int, str]) -> None:
    """Queue the callbacks of sockets: the socket, and the function that will be called."""
    at = DATA + 0x100000 * cpu + 0x10000 + 8
    for address, name in queued:
        head = address + offsetof(image.type("struct sock"), "sk_rcu")
        image.words(at, head)
        image.words(head, 0, min(place(name)))
        at = head


def works(image: MadeImage, *queued: tuple[int, str, int]) -> list[int]:
    """Queue work items: the socket, the function, ``work->data``. Return their addresses."""
    found = [WORKS + 128 * number + 8 for number in range(len(queued))]
    linked(image, QUEUE + 256 + 24, *(work + 8 for work in found))
    for work, (address, name, data) in zip(found, queued, strict=True):
        image.words(work - 8, address, data)
        image.words(work + 24, min(place(name)))
    return found


@pytest.mark.parametrize(
    ("counter", "is_used"), [(0, False), (1, True), (0x7FFFFFFF, True), (0xFFFFFFFF, False)]
)
def test_a_socket_in_use_counts_itself(counter: int, is_used: bool) -> None:
    """``sk_wmem_alloc`` is a signed integer; a counter that was damaged is below 0."""
    image = machine()
    address = sock(image, 0, ONE, counter)
    assert SockUse(image).at(address) is is_used
    data = image.memory.read(address, 40)
    assert SockUse(image).of(data) is is_used


def test_sockets_that_wait_for_a_grace_period() -> None:
    """On any CPU. Callbacks of something else, and sockets of other memcgs, do not count."""
    image = machine()
    assert closing_sockets(image, {ONE, TWO}) == Counter()
    socks = [sock(image, n, memcg) for n, memcg in enumerate((ONE, ONE, TWO, OTHER, ONE))]
    callbacks(image, 0, (socks[0], DESTRUCT), (socks[4], "sk_free"), (socks[1], DESTRUCT))
    callbacks(image, 1, (socks[2], DESTRUCT), (socks[3], DESTRUCT))
    assert closing_sockets(image, {ONE, TWO}) == {ONE: 2, TWO: 1}


def test_sockets_whose_end_is_told_to_listeners() -> None:
    """A work item that a worker has begun with is not pending."""
    image = machine()
    socks = [sock(image, n, memcg) for n, memcg in enumerate((ONE, TWO, ONE, ONE))]
    states = [(BROADCAST, 1), (BROADCAST, 5), (BROADCAST, 4), ("sk_free", 1)]
    works(image, *((at, *state) for at, state in zip(socks, states, strict=True)))
    assert closing_sockets(image, {ONE, TWO}) == {ONE: 1, TWO: 1}
    callbacks(image, 0, (socks[2], DESTRUCT))
    assert closing_sockets(image, {ONE, TWO}) == {ONE: 2, TWO: 1}


def test_work_items_that_are_not_in_the_image() -> None:
    image = machine()
    works(image, (sock(image, 0, ONE), BROADCAST, 1))
    image.words(QUEUE + 256 + 24, MISSING, MISSING)
    with pytest.raises(FaultError) as error:
        closing_sockets(image, {ONE})
    assert MISSING <= error.value.address < MISSING + 64


def test_a_kernel_without_listeners() -> None:
    image = machine(listeners=False)
    callbacks(image, 0, (sock(image, 0, ONE), DESTRUCT))
    assert closing_sockets(image, {ONE}) == {ONE: 1}
    assert broadcast_sockets(image) is None
    # The types of a module may not be known.
    image.symbol_at(BROADCAST, min(place(BROADCAST)), 2)
    works(image, (sock(image, 1, ONE), BROADCAST, 1))
    assert closing_sockets(image, {ONE}) == {ONE: 1}
    assert broadcast_sockets(image) is None


def test_a_kernel_without_sockets() -> None:
    image = MadeImage()
    assert closing_sockets(image, {ONE}) == Counter()
    assert freed_sockets(image) is deferred_sockets(image) is broadcast_sockets(image) is None
    image.symbol_at(DESTRUCT, TEXT)
    assert closing_sockets(image, {ONE}) == Counter()


def test_sockets_that_tasks_free() -> None:
    """A socket in use is in its slab, and what is no socket refers to nothing."""
    image = machine()
    found = freed_sockets(image)
    assert found is not None
    assert found.places == place(*FREE)
    assert found.refers_to(sock(image, 0, ONE)) == ONE
    assert found.refers_to(sock(image, 0, ONE, 1)) is None
    assert found.refers_to(MISSING) is None


def test_sockets_whose_callbacks_tasks_queue() -> None:
    """The task has a pointer to the ``struct rcu_head``."""
    image = machine()
    found, head = deferred_sockets(image), offsetof(image.type("struct sock"), "sk_rcu")
    assert found is not None
    assert found.places == place(*CALLS)
    assert found.refers_to(sock(image, 0, ONE) + head) == ONE
    assert found.refers_to(sock(image, 0, ONE, 1) + head) is None
    assert [found.refers_to(word) for word in (0, 1, head, MISSING)] == [None] * 4


def test_sockets_whose_work_items_tasks_queue_or_run() -> None:
    """The task has a pointer to the ``struct work_struct``."""
    image = machine()
    [ours, theirs, wrong] = works(
        image,
        (sock(image, 0, ONE), BROADCAST, 0),
        (sock(image, 1, ONE), "sk_free", 0),
        (MISSING, BROADCAST, 0),
    )
    found = broadcast_sockets(image)
    assert found is not None
    assert found.places == place(BROADCAST, *QUEUES)
    assert [found.refers_to(work) for work in (ours, theirs, wrong, MISSING)] == [
        *(ONE, None, None, None)
    ]
    sock(image, 0, ONE, 1)
    assert found.refers_to(ours) is None
