# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sockets that are being freed
----------------------------

Mirrors ``sk_destruct()`` of :linux:`net/core/sock.c`. A socket with ``SOCK_RCU_FREE``, for example
a bound one of UDP, waits for a grace period when its last reference is gone. It holds a reference
to its memcg until then (``mem_cgroup_sk_free()``). Its slot looks free before it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from drgn import offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.rcu import queued_callbacks

__all__ = ("closing_sockets",)


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
