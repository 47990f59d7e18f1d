# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Huge pages of hugetlb
---------------------

Mirrors ``folio_test_hugetlb()``, up to 6.7 ``PageHuge()`` of :linux:`mm/hugetlb.c`.
"""

from __future__ import annotations

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, constant, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.mm_types import first_tail_offset, page_layout, type_markers
from memcg_inspect.linux.mm.mm_types_columns import Marker
from memcg_inspect.linux.mm.mm_types_orders import MOST_ORDER
from memcg_inspect.linux.mm.mmzone import mem_map

__all__ = ("HugetlbPages", "huge_page_orders", "most_compound_order")

#: No architecture has more sizes of huge pages (``HUGE_MAX_HSTATE``).
_MOST_SIZES = 16
#: The least bit of a page type. An enumerator below is the number of a page flag.
_LEAST_TYPE_BIT = 0x80


def huge_page_orders(image: Image) -> tuple[int, ...]:
    """
    Return the orders of huge pages, in the order of ``hstates``.

    :raises drgn.FaultError: if they cannot be read, or are none
    """
    number, states = image.object("hugetlb_max_hstate"), image.object("hstates")
    if not 0 <= int(number) <= _MOST_SIZES:
        raise FaultError(f"{int(number)} sizes of huge pages", number.address_ or 0)
    orders = tuple(int(states[n].order) for n in range(int(number)))
    if any(order > MOST_ORDER for order in orders):
        raise FaultError("a huge page has no order", states.address_ or 0)
    return orders


def most_compound_order(image: Image) -> int:
    """
    Return the order of the largest compound page that can be.

    It is that of the largest block of the buddy allocator, or of the largest huge page of hugetlb:
    ``alloc_gigantic_folio()`` and ``alloc_bootmem_huge_page()`` make larger ones.
    """
    # MAX_PAGE_ORDER
    most = array_length(member_type(image.type("struct zone"), "free_area")) - 1
    try:
        return max(most, *huge_page_orders(image), 0)
    except UnknownKernelError:
        return most  # CONFIG_HUGETLB_PAGE=n
    except FaultError:
        return MOST_ORDER


class HugetlbPages:
    """
    Tells compound pages of hugetlb from others.

    - Since commit d99e3140a4d3 ("mm: turn folio_test_hugetlb into a PageType") (in v6.10) they
      have a page type;
    - before, since 6.6, the second page has the flag ``PG_hugetlb``;
    - before, the second page has the destructor ``HUGETLB_PAGE_DTOR``.
    """

    def __init__(self, image: Image) -> None:
        self._size = mem_map(image).size
        self._type = self._page_type(image)
        self._second = None if self._type else self._second_page(image)

    def begins(self, data: bytes, i: int) -> bool:
        """
        Return whether a compound page is one of hugetlb.

        :param data: an array of ``struct page``
        :param i: index of the first page of a compound page
        """
        if self._type:
            raw = data[i * self._size : (i + 1) * self._size]
            return all(marker.is_set(raw) for marker in self._type)
        after = data[(i + 1) * self._size : (i + 2) * self._size]
        return self._second is not None and bool(after) and self._second.is_set(after)

    def _page_type(self, image: Image) -> tuple[Marker, ...]:
        bit = constant(image, "PG_hugetlb")
        is_type = bit is not None and bit >= _LEAST_TYPE_BIT
        if constant(image, "PGTY_hugetlb") is None and not is_type:
            return ()
        return type_markers(image, image.memory, page_layout(image).page_type, "hugetlb", 0)

    def _second_page(self, image: Image) -> Marker | None:
        memory, value = image.memory, constant(image, "HUGETLB_PAGE_DTOR")
        offset = first_tail_offset(image, "compound_dtor", "_folio_dtor")
        if offset is not None and value is not None:
            return Marker(offset, 0xFF, value)
        bit = constant(image, "PG_hugetlb")
        if bit is None or bit >= 8 * memory.word_size:
            return None
        at = memory.byte_of_word(mem_map(image).flags, bit // 8)
        return Marker(at, 1 << bit % 8, 1 << bit % 8)
