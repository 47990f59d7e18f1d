# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sockets that are being freed
----------------------------

Mirrors ``sk_destruct()`` of :linux:`net/core/sock.c`. A socket with ``SOCK_RCU_FREE``, for example
a bound one of UDP, waits for a grace period when its last reference is gone. It holds a reference
to its memcg until then (``mem_cgroup_sk_free()``). Its slot looks free before it is. So does that
of a socket that a task is freeing: only the stack and registers of the task show that it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from drgn import FaultError, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.rcu import queued_callbacks
from memcg_inspect.linux.kernel.stacktrace_refs import Freeing

__all__ = ("closing_sockets", "freed_sockets")

#: Functions that a task is in from the last reference to a socket on until it is freed.
_FREE = ("sk_free", "__sk_free", "sk_destruct", "__sk_destruct")


def closing_sockets(image: Image, memcgs: Container[int]) -> Counter[int]:
    """
    Count the sockets that wait for ``__sk_destruct()``.

    :param memcgs: ``struct mem_cgroup *`` of the memcgs whose sockets are counted
    :return: by ``struct mem_cgroup *``
    :raises drgn.FaultError: if a list of RCU callbacks, or a socket, cannot be read
    """
    found: Counter[int] = Counter()
    try:
        destruct = image.symbol("__sk_destruct").address
        sock = image.type("struct sock")
    except UnknownKernelError:
        return found  # CONFIG_NET=n
    head, memcg, memory = offsetof(sock, "sk_rcu"), offsetof(sock, "sk_memcg"), image.memory
    for callback in queued_callbacks(image):
        # struct rcu_head has the function after the pointer to the next one.
        if memory.word(callback + memory.word_size) == destruct:
            payer = memory.word(callback - head + memcg)
            if payer in memcgs:
                found[payer] += 1
    return found


def freed_sockets(image: Image) -> Freeing | None:
    """Return how to find sockets that tasks are freeing; ``None`` without ``CONFIG_NET``."""
    try:
        symbols = [image.symbol(name) for name in _FREE]
        sock = image.type("struct sock")
    except UnknownKernelError:
        return None
    memory, order = image.memory, image.memory.order
    refs, wmem = offsetof(sock, "__sk_common.skc_refcnt"), offsetof(sock, "sk_wmem_alloc")
    memcg = offsetof(sock, "sk_memcg")

    def refers_to(address: int) -> int | None:
        try:
            for counter in (refs, wmem):
                if int.from_bytes(memory.read(address + counter, 4), order):
                    return None  # It is found in its slab.
            return memory.word(address + memcg)
        except FaultError:
            return None

    return Freeing(symbols, refers_to)
