# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sockets that are being freed
----------------------------

Mirrors ``sk_destruct()`` of :linux:`net/core/sock.c`. A socket with ``SOCK_RCU_FREE``, for example
a bound one of UDP, waits for a grace period when its last reference is gone. It holds a reference
to its memcg until then (``mem_cgroup_sk_free()``). Its slot looks free before it is. So does that
of a socket that a task is freeing: only the stack and registers of the task show that it is not.

If somebody listens for sockets that are closed (``ss -E``), ``sock_diag_broadcast_destroy()``
leaves ``sk_destruct()`` to a work item, which refers to the socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from drgn import FaultError, container_of, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.rcu import queued_callbacks
from memcg_inspect.linux.kernel.stacktrace_refs import Freeing
from memcg_inspect.linux.kernel.stacktrace_words import places_in
from memcg_inspect.linux.kernel.workqueue import is_pending, works_of

__all__ = ("SockUse", "broadcast_sockets", "closing_sockets", "deferred_sockets", "freed_sockets")

#: Bytes of a ``refcount_t``.
_INT = 4
_BROADCAST = "sock_diag_broadcast_destroy_work"
#: Functions that a task is in from the last reference to a socket on until it is freed. Each may
#: end with a jump to the next one, and leave no trace of itself.
_FREE = (
    *("sk_free", "__sk_free", "sk_destruct", "__sk_destruct"),
    *("sock_diag_broadcast_destroy", _BROADCAST),
)
#: Functions of :linux:`kernel/workqueue.c` that a task is in until the work item is on a list.
#: sock_diag_broadcast_destroy() ends with a jump to the first.
_QUEUE = ("queue_work_on", "__queue_work", "insert_work")
#: Functions of :linux:`kernel/rcu/tree.c` that a task is in until the callback is on a list.
#: sk_destruct() ends with a jump to the first, which ends with one to the second (since 6.2).
_CALL = ("call_rcu", "__call_rcu_common")


class SockUse:
    """
    Whether a ``struct sock`` is in use: its ``sk_wmem_alloc`` is positive.

    sk_alloc() and sk_clone() set it to 1 before the socket gets its memcg, and each buffer in
    flight adds to it. sk_free() drops the 1. Whoever brings it to 0 frees the socket. ``sk_refcnt``
    does not show it: callers of sk_free() itself, like bpf_prog_test_run_skb(), leave it as it was.
    """

    def __init__(self, image: Image) -> None:
        self._memory = image.memory
        self._counter = offsetof(image.type("struct sock"), "sk_wmem_alloc")

    def of(self, data: bytes) -> bool:
        """
        Return whether a socket is in use.

        :param data: the ``struct sock``
        """
        return self._is_positive(data[self._counter : self._counter + _INT])

    def at(self, address: int) -> bool:
        """
        Return whether a socket is in use.

        :param address: ``struct sock *``
        :raises drgn.FaultError: if it cannot be read
        """
        return self._is_positive(self._memory.read(address + self._counter, _INT))

    def _is_positive(self, counter: bytes) -> bool:
        return int.from_bytes(counter, self._memory.order, signed=True) > 0


def closing_sockets(image: Image, memcgs: Container[int]) -> Counter[int]:
    """
    Count the sockets that wait for ``sk_destruct()`` or ``__sk_destruct()``.

    :param memcgs: ``struct mem_cgroup *`` of the memcgs whose sockets are counted
    :return: by ``struct mem_cgroup *``
    :raises drgn.FaultError: if a list of RCU callbacks or work items, or a socket, cannot be read
    """
    try:
        destruct = image.symbol("__sk_destruct").address
        sock = image.type("struct sock")
    except UnknownKernelError:
        return Counter()  # CONFIG_NET=n
    head, memcg, memory = offsetof(sock, "sk_rcu"), offsetof(sock, "sk_memcg"), image.memory
    sockets = {
        callback - head
        for callback in queued_callbacks(image)
        # struct rcu_head has the function after the pointer to the next one.
        if memory.word(callback + memory.word_size) == destruct
    }
    payers = [memory.word(address + memcg) for address in (*sockets, *_broadcast(image))]
    return Counter(payer for payer in payers if payer in memcgs)


def _broadcast(image: Image) -> set[int]:
    """
    Return the sockets whose destruction will be told to listeners, ``struct sock *``.

    Those that a worker has begun with are not among them: it may have freed them already.

    :raises drgn.FaultError: if a list of work items, or one of them, cannot be read
    """
    try:
        function = image.symbol(_BROADCAST).address
        image.type("struct broadcast_sk")
    except UnknownKernelError:
        return set()
    faults: list[FaultError] = []
    works = works_of(image, function, faults.append)
    found = {
        container_of(work, "struct broadcast_sk", "work").sk.value_()
        for work in works
        if is_pending(work)
    }
    if faults:
        raise faults[0]
    return found


def freed_sockets(image: Image) -> Freeing | None:
    """Return how to find sockets that tasks are freeing; ``None`` without ``CONFIG_NET``."""
    payer = _payer_of_unused(image)
    return None if payer is None else Freeing(places_in(image, _FREE), payer)


def _payer_of_unused(image: Image) -> Callable[[int], int | None] | None:
    """
    Return what finds the memcg that a ``struct sock *`` refers to, if the socket is not in use.

    :return: ``None`` without ``CONFIG_NET``
    """
    try:
        sock = image.type("struct sock")
    except UnknownKernelError:
        return None
    memory, use, memcg = image.memory, SockUse(image), offsetof(sock, "sk_memcg")

    def refers_to(address: int) -> int | None:
        try:
            # A socket in use is found in its slab.
            return None if use.at(address) else memory.word(address + memcg)
        except FaultError:
            return None

    return refers_to


def deferred_sockets(image: Image) -> Freeing | None:
    """
    Return how to find sockets whose RCU callbacks tasks queue; ``None`` without ``CONFIG_NET``.

    Such a task has a pointer to the ``struct rcu_head`` of the socket only, and is in none of the
    functions that free sockets if all end with a jump.
    """
    payer = _payer_of_unused(image)
    if payer is None:
        return None
    head = offsetof(image.type("struct sock"), "sk_rcu")

    def refers_to(address: int) -> int | None:
        return payer(address - head) if address > head else None

    return Freeing(places_in(image, _CALL), refers_to)


def broadcast_sockets(image: Image) -> Freeing | None:
    """
    Return how to find sockets whose destruction workers tell to listeners, or are about to.

    A worker that has just begun has a pointer to the work item only. So has the task that queues
    the work item, which is in none of the functions that free sockets if all end with a jump.

    :return: ``None`` on a kernel that has no such listeners
    """
    payer = _payer_of_unused(image)
    try:
        function, broadcast = image.symbol(_BROADCAST).address, image.type("struct broadcast_sk")
    except UnknownKernelError:
        return None
    memory, func = image.memory, offsetof(image.type("struct work_struct"), "func")
    work, sock = offsetof(broadcast, "work"), offsetof(broadcast, "sk")

    def refers_to(address: int) -> int | None:
        try:
            if payer is None or memory.word(address + func) != function:
                return None
            return payer(memory.word(address - work + sock))
        except FaultError:
            return None

    return Freeing(places_in(image, (_BROADCAST, *_QUEUE)), refers_to)
