# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page counters of memcgs
-----------------------

Mirrors ``struct page_counter`` (:linux:`include/linux/page_counter.h`), of which ``struct
mem_cgroup`` has several.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import Object

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.mm.memcontrol import on_default_hierarchy
from memcg_inspect.model_counters import CounterWord

__all__ = ("memory_usage", "page_counter_usage", "page_counter_words", "page_counters")

#: Page counters of cgroup v1.
_V1_COUNTERS = ("memory", "memsw", "kmem", "tcpmem")


@per_image
def page_counters(image: Image) -> tuple[str, ...]:
    """
    Return the page counters that are in use.

    ``swap`` and ``memsw`` share their memory: the first is used on cgroup v2, the others only on
    v1. A kernel without ``CONFIG_MEMCG_V1`` has no ``kmem`` and ``tcpmem``.

    :return: members of ``struct mem_cgroup``
    """
    names = ("memory", "swap") if on_default_hierarchy(image) else _V1_COUNTERS
    return tuple(name for name in names if has_member(image, "struct mem_cgroup", name))


def page_counter_usage(memcg: Object, name: str) -> int:
    """
    Return the usage of a page counter of a memcg, in pages.

    :param memcg: ``struct mem_cgroup *``
    :param name: one of :func:`page_counters()`
    :raises drgn.FaultError: if it cannot be read
    """
    return int(memcg.member_(name).usage.counter)


def page_counter_words(image: Image, memcg: Object) -> Iterator[CounterWord]:
    """
    Yield the words that the page counters of a memcg are in.

    :param memcg: ``struct mem_cgroup *``
    """
    for name in page_counters(image):
        address = memcg.member_(name).usage.counter.address_of_().value_()
        yield CounterWord("page_counter", f"{name}.usage", address, image.memory.word_size)


def memory_usage(memcg: Object) -> int:
    """
    Return the page counter of a memcg, ``memcg->memory.usage``, in pages.

    :param memcg: ``struct mem_cgroup *``
    :raises drgn.FaultError: if it cannot be read
    """
    return page_counter_usage(memcg, "memory")
