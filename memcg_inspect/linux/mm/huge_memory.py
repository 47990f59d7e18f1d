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
from memcg_inspect.model import Coverage

__all__ = ("huge_zero_pages",)


def huge_zero_pages(image: Image, coverage: Coverage) -> range:
    """
    Return the page frames of the huge page of zeroes; empty if there is none now.

    :param coverage: counts what was read
    """
    try:
        pfn = int(image.object("huge_zero_pfn").value_())
    except UnknownKernelError:
        return range(0)  # CONFIG_TRANSPARENT_HUGEPAGE=n
    except FaultError as error:
        coverage.miss("huge_zero_pfn", error.address, str(error))
        return range(0)
    coverage.read += 1
    if not 0 < pfn < memory_map_end(image):
        return range(0)
    return range(pfn, pfn + (1 << huge_page_order(image)))  # HPAGE_PMD_NR
