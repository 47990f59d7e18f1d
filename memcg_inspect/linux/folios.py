# SPDX-License-Identifier: LGPL-2.1-or-later
"""
User pages of some payers, one by one
-------------------------------------

The pass over all pages only counts user pages. Who asks for addresses and files asks here, for
few payers.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from drgn import Program, offsetof

from memcg_inspect.linux.layout import constant, per_program
from memcg_inspect.linux.memory import memory_of
from memcg_inspect.linux.mmzone import mem_map
from memcg_inspect.linux.page_flags import page_flags
from memcg_inspect.linux.pages import RawPiece, page_layout

__all__ = ("Folio", "folios_of", "swap_cache_bits")


class Folio(NamedTuple):
    """
    A user page, or a compound one.

    :ivar page: ``struct page *``, of the head
    :ivar payer: ``struct obj_cgroup *``, before 7.2 ``struct mem_cgroup *``
    :ivar mapping: ``folio->mapping``, with its flags
    :ivar swap_cache: whether it is in the swap cache: ``folio_test_swapcache()``
    """

    page: int
    nid: int
    order: int
    payer: int
    mapping: int
    swap_cache: bool


@per_program
def swap_cache_bits(prog: Program) -> int:
    """Return the flags that a page of the swap cache has, all of them."""
    # PG_swapcache means something else to pages without PG_swapbacked.
    bit = constant(prog, "PG_swapcache") or 0
    return 1 << bit | 1 << page_flags(prog).swapbacked.shift


def folios_of(prog: Program, piece: RawPiece, payers: Set[int]) -> Iterator[Folio]:
    """
    Return the user pages in a piece of the memory map that are charged to some payers.

    :param payers: ``struct obj_cgroup *``, before 7.2 ``struct mem_cgroup *``
    """
    memory, frames, layout = memory_of(prog), mem_map(prog), page_layout(prog)
    size, bits = frames.size, swap_cache_bits(prog)
    words = memory.words(piece.data, layout.memcg_data, size)
    if payers.isdisjoint(words):
        return
    mapping = offsetof(prog.type("struct page"), "mapping")
    for i, word in enumerate(words):
        if word not in payers or layout.tail.is_set(raw := piece.data[i * size : (i + 1) * size]):
            continue
        yield Folio(
            page=piece.page + i * size,
            nid=piece.nid(i),
            order=piece.orders.get(i, 0),
            payer=word,
            mapping=memory.word_at(raw, mapping),
            swap_cache=memory.word_at(raw, frames.flags) & bits == bits,
        )
