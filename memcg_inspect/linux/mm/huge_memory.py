# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The huge page of zeroes
-----------------------

Mirrors ``get_huge_zero_folio()`` of :linux:`mm/huge_memory.c`.
"""

from __future__ import annotations

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.page_tables import huge_page_order
from memcg_inspect.linux.mm.mmzone import memory_map_end

__all__ = ("huge_zero_pages",)


def huge_zero_pages(image: Image) -> range:
    """Return the page frames of the huge page of zeroes; empty if there is none now."""
    try:
        pfn = int(image.object("huge_zero_pfn").value_())
    except (UnknownKernelError, FaultError):
        return range(0)  # CONFIG_TRANSPARENT_HUGEPAGE=n
    if not 0 < pfn < memory_map_end(image):
        return range(0)
    return range(pfn, pfn + (1 << huge_page_order(image)))  # HPAGE_PMD_NR
