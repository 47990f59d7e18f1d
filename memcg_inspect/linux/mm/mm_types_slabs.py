# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Slabs of a piece of the memory map
----------------------------------

A slab (``struct slab`` of :linux:`mm/slab.h`) overlays the ``struct page`` of its first page.
:class:`SlabPages` has the slabs of a piece as columns. It makes a :class:`SlabPage` of one only if
somebody asks for it: a machine has millions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcg_inspect.linux.mm.mm_types_columns import PageColumns

__all__ = ("SlabPage", "SlabPages")


class SlabPage(NamedTuple):
    """
    The first page of a slab.

    :ivar page: ``struct page *``, which is also its ``struct slab *``
    :ivar nid: node
    :ivar order: the slab has ``1 << order`` pages
    :ivar raw: the bytes of its ``struct page``
    """

    page: int
    nid: int
    order: int
    raw: bytes


class SlabPages:
    """
    The slabs that begin in a piece of the memory map.

    :ivar address: ``struct page *`` of the first page of the piece
    :ivar indexes: index of the first page of each slab in the piece, in ascending order
    :ivar nids: node of each slab
    :ivar orders: each slab has ``1 << order`` pages
    :ivar size: ``sizeof(struct page)``
    """

    __slots__ = ("_data", "address", "indexes", "nids", "orders", "size")

    def __init__(
        self,
        address: int,
        columns: PageColumns,
        indexes: list[int],
        nids: int | list[int],
        orders: dict[int, int],
    ) -> None:
        """
        :param columns: the pages of the piece
        :param nids: the node of all pages, or a list with the node of each
        :param orders: orders of compound pages by index of the head
        """
        self.address, self.indexes = address, indexes
        self._data, self.size = columns.data, columns.size
        self.nids = [nids] * len(indexes) if isinstance(nids, int) else [nids[i] for i in indexes]
        self.orders = [orders.get(i, 0) for i in indexes]

    def __len__(self) -> int:
        return len(self.indexes)

    def __getitem__(self, number: int) -> SlabPage:
        at = self.indexes[number] * self.size
        raw = self._data[at : at + self.size]
        return SlabPage(self.address + at, self.nids[number], self.orders[number], raw)

    def __iter__(self) -> Iterator[SlabPage]:
        return map(self.__getitem__, range(len(self.indexes)))

    def raw(self) -> bytes:
        """Return the ``struct page`` of all slabs, one after the other."""
        data, size = self._data, self.size
        return b"".join([data[i * size : (i + 1) * size] for i in self.indexes])
