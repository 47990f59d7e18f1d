# SPDX-License-Identifier: LGPL-2.1-or-later
"""
RCU callbacks
-------------

Mirrors :linux:`kernel/rcu/tree.h` and :linux:`kernel/rcu/rcu_segcblist.c`: ``call_rcu()`` adds a
``struct rcu_head`` to the list of its CPU (``rcu_data.cblist``), or, for a CPU whose callbacks a
thread runs, to ``rcu_data.nocb_bypass``. Callbacks that ``rcu_do_batch()`` is running are in no
list.
"""

from __future__ import annotations

from drgn import FaultError, Object
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mmzone import possible_cpus

__all__ = ("MOST_CALLBACKS", "queued_callbacks")

#: Most callbacks that are followed in one list. A longer list is taken for damaged.
MOST_CALLBACKS = 1 << 20


def queued_callbacks(image: Image) -> dict[int, int]:
    """
    Return the callbacks that wait for a grace period, or to be called.

    :return: CPU by ``struct rcu_head *``
    :raises drgn.FaultError: if a list cannot be read, or is broken
    """
    found: dict[int, int] = {}
    for cpu in possible_cpus(image):
        rdp = per_cpu(image.object("rcu_data"), cpu)
        for name in ("cblist", "nocb_bypass"):
            if rdp.type_.has_member(name):
                _follow(image, rdp.member_(name).head.read_(), cpu, found)
    return found


def _follow(image: Image, head: Object, cpu: int, found: dict[int, int]) -> None:
    address = head.value_()
    for _ in range(MOST_CALLBACKS):
        if not address:
            return
        if address in found:
            raise FaultError("a callback is in two lists, or twice in one", address)
        found[address] = cpu
        # struct rcu_head begins with the pointer to the next one.
        address = image.memory.word(address)
    raise FaultError("the list of callbacks does not end", address)
