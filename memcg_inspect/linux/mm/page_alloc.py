# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Free pages that are in no buddy list
------------------------------------

Mirrors ``free_frozen_page_commit()`` (``free_unref_page_commit()`` on older kernels) and
``add_page_to_zone_llist()`` of :linux:`mm/page_alloc.c`. They keep free blocks on the per-CPU
lists of a zone (``struct per_cpu_pages``), and on ``zone->trylock_free_pages`` if a lock cannot be
taken. Nothing in the ``struct page`` of such a block tells that it is free.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, offsetof
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, has_member
from memcg_inspect.image.memory import Memory
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.model import Coverage

__all__ = ("cached_free_pages",)


def cached_free_pages(image: Image, coverage: Coverage) -> set[int]:
    """
    Return the free blocks that are in no buddy list.

    :param coverage: counts the blocks that were found, and the lists that are unreadable
    :return: ``struct page *`` of the first page of each block
    """
    memory, page = image.memory, image.type("struct page")
    # Commit bf75f200569d ("mm/page_alloc: add page->buddy_list and page->pcp_list") (in v6.0).
    link = offsetof(page, "pcp_list" if page.has_member("pcp_list") else "lru")
    links: set[int] = set()
    for zone in _zones(image):
        try:
            heads = list(_heads(image, zone))
        except FaultError as error:
            coverage.miss("free pages of CPUs", error.address, str(error))
            continue
        for head, ends in heads:
            _walk(memory, head, ends, links, coverage)
    coverage.read += len(links)
    return {address - link for address in links}


def _walk(
    memory: Memory, head: int, ends: tuple[int, ...], links: set[int], coverage: Coverage
) -> None:
    """
    Add the links of a list to *links*.

    :param head: ``struct list_head *`` or ``struct llist_head *``
    :param ends: byte offsets of the pointers to follow from the head: first the next link, then,
        for lists with two ends, the previous link. The latter is used if the list is broken
    """
    for way, offset in enumerate(ends):
        link = head
        try:
            link = memory.word(head + offset)
            while link not in (head, 0) and link not in links:
                links.add(link)
                link = memory.word(link + offset)
            if link in (head, 0):
                return
            reason = "the list does not lead back to its head"
        except FaultError as error:
            reason = str(error)
        if not way:
            coverage.miss("free pages of a CPU", link, reason)


def _zones(image: Image) -> Iterator[Object]:
    for pgdat in for_each_online_pgdat(image.prog):
        zones = pgdat.node_zones
        for i in range(array_length(zones.type_)):
            yield zones[i]


def _heads(image: Image, zone: Object) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Return the address of each list of a ``struct zone``, and the *ends* of :func:`_walk()`."""
    ends = tuple(offsetof(image.type("struct list_head"), way) for way in ("next", "prev"))
    if zone.per_cpu_pageset:
        for cpu in possible_cpus(image):
            lists = per_cpu_ptr(zone.per_cpu_pageset, cpu).lists
            for i in range(array_length(lists.type_)):
                yield int(lists[i].address_ or 0), ends
    # Commit 8c57b687e833 ("mm, bpf: Introduce free_pages_nolock()") (in v6.15). pcp_llist, which
    # links these pages, is in a union with pcp_list.
    if has_member(image, "struct zone", "trylock_free_pages"):
        yield int(zone.trylock_free_pages.address_ or 0), (0,)
