# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages and folios by memcg
-------------------------

Mirrors ``enum page_memcg_data_flags``, ``folio_objcg()`` and ``folio_memcg()`` of
:linux:`include/linux/memcontrol.h`: ``memcg_data`` of a page says who pays for it. A page of
the kernel refers to an obj_cgroup. A user page refers to an obj_cgroup since 7.1, and to the
memcg itself before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from typing import NamedTuple

from drgn import TypeKind, offsetof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import constant
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mm_types import (
    MEMCG_DATA_FLAGS,
    MEMCG_DATA_KMEM,
    RawPiece,
    page_layout,
)
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.page_flags import page_flags
from memcg_inspect.model import Coverage

__all__ = (
    "Folio",
    "charges_node_of_folio",
    "count_payers",
    "folios_of",
    "kernel_payers",
    "swap_cache_bits",
)


@per_image
def charges_node_of_folio(image: Image) -> bool:
    """
    Return whether ``charge_memcg()`` takes the obj_cgroup of the node of the folio.

    It does since 7.2, where ``__get_obj_cgroup_from_memcg()`` has a parameter for the node. In 7.1,
    this function takes the obj_cgroup of the node of the task. If the compiler left no such
    function, it is not known, and the answer is no.
    """
    try:
        of_memcg = image.object("__get_obj_cgroup_from_memcg").type_
    except UnknownKernelError:
        return False
    return of_memcg.kind == TypeKind.FUNCTION and len(of_memcg.parameters) > 1


def count_payers(image: Image, pages: list[int], coverage: Coverage) -> Counter[tuple[int, int]]:
    """
    Count pages of the kernel by payer and node.

    :param pages: ``struct page *``
    :param coverage: counts the ``struct page`` that were read, and those that are unreadable
    :return: number of pages by ``struct obj_cgroup *`` (0 if no memcg pays) and node
    """
    memory, frames, layout = image.memory, mem_map(image), page_layout(image)
    found: Counter[tuple[int, int]] = Counter()
    for first, count in _runs(sorted(pages), frames.size):
        for offset, data in memory.pieces(first, count * frames.size, frames.size):
            if data is None:
                coverage.miss("struct pages", first + offset, "not in the image")
                continue
            words = memory.words(data, layout.memcg_data, frames.size)
            flags = memory.words(data, frames.flags, frames.size)
            coverage.read += len(words)
            found.update(
                (
                    word & ~MEMCG_DATA_FLAGS if word & MEMCG_DATA_FLAGS == MEMCG_DATA_KMEM else 0,
                    frames.nid(flag),
                )
                for word, flag in zip(words, flags, strict=True)
            )
    return found


def kernel_payers(image: Image, pages: list[int]) -> dict[int, tuple[int, int]]:
    """
    Return who pays for some pages of the kernel.

    :param pages: ``struct page *``
    :return: ``struct obj_cgroup *`` (0 if no memcg pays) and node, by ``struct page *``
    :raises drgn.FaultError: if a ``struct page`` cannot be read
    """
    memory, frames, layout = image.memory, mem_map(image), page_layout(image)
    found = {}
    for page in pages:
        raw = memory.read(page, frames.size)
        word = memory.word_at(raw, layout.memcg_data)
        is_kmem = word & MEMCG_DATA_FLAGS == MEMCG_DATA_KMEM
        nid = frames.nid(memory.word_at(raw, frames.flags))
        found[page] = word & ~MEMCG_DATA_FLAGS if is_kmem else 0, nid
    return found


def _runs(pages: list[int], size: int) -> Iterator[tuple[int, int]]:
    """Return runs of ``struct page`` that are contiguous: the first one and their number."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + size:
            yield pages[start], i - start
            start = i


class Folio(NamedTuple):
    """
    One folio of user memory.

    :ivar page: ``struct page *`` of its first page
    :ivar nid: node
    :ivar order: the folio has ``1 << order`` pages
    :ivar payer: ``struct obj_cgroup *``, up to 7.0 ``struct mem_cgroup *``
    :ivar mapping: ``folio->mapping`` with its flags
    :ivar swap_cache: whether it is in the swap cache, ``folio_test_swapcache()``
    """

    page: int
    nid: int
    order: int
    payer: int
    mapping: int
    swap_cache: bool


@per_image
def swap_cache_bits(image: Image) -> int:
    """
    Return the flags that are set for folios in the swap cache.

    Mirrors ``folio_test_swapcache()``: ``PG_swapcache`` alone is not enough, because it means
    ``PG_owner_priv_1`` for folios without ``PG_swapbacked``.

    :return: mask of ``page->flags``; a folio is in the swap cache if all of them are set
    """
    bit = constant(image, "PG_swapcache") or 0
    return 1 << bit | 1 << page_flags(image).swapbacked.shift


def folios_of(image: Image, piece: RawPiece, payers: Set[int]) -> Iterator[Folio]:
    """
    Return the folios of user memory in a piece of the memory map that some payers pay for.

    :param payers: ``struct obj_cgroup *``, up to 7.0 ``struct mem_cgroup *``
    """
    memory, frames, layout = image.memory, mem_map(image), page_layout(image)
    size, swap_cache = frames.size, swap_cache_bits(image)
    words = memory.words(piece.data, layout.memcg_data, size)
    if payers.isdisjoint(words):
        return
    mapping = offsetof(image.type("struct page"), "mapping")
    for i, word in enumerate(words):
        if word not in payers or layout.tail.is_set(raw := piece.data[i * size : (i + 1) * size]):
            continue
        yield Folio(
            page=piece.page + i * size,
            nid=piece.nid(i),
            order=piece.orders.get(i, 0),
            payer=word,
            mapping=memory.word_at(raw, mapping),
            swap_cache=memory.word_at(raw, frames.flags) & swap_cache == swap_cache,
        )
