# SPDX-License-Identifier: LGPL-2.1-or-later
"""The use of charged pages whose ``struct page`` does not show it."""

from __future__ import annotations

from collections import defaultdict

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch.x86 import hidden_pgd_pages
from memcg_inspect.linux.io_uring.io_uring import io_uring_pages
from memcg_inspect.linux.mm.mm_types import KmemPage, page_layout
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.vmalloc import stack_blocks, thread_size, vm_areas
from memcg_inspect.linux.net.skbuff import unix_socket_pages
from memcg_inspect.model import Coverage

__all__ = ("PageUses",)


class PageUses:
    """
    The uses of charged pages, found through the owners of the pages.

    :ivar stacks_are_blocks: whether kernel stacks are blocks of pages, not vmalloc areas
    """

    def __init__(self, image: Image, coverage: defaultdict[str, Coverage]) -> None:
        # Without PGTY_large_kmalloc, compound pages of no other use are taken for large kmallocs.
        self._has_large_kmalloc = page_layout(image).has_large_kmalloc
        self._uses: dict[int, tuple[str, int]] = {}
        for area in vm_areas(image, coverage["vmalloc"], coverage["stacks"]):
            self._uses |= dict.fromkeys(area.pages, ("stack" if area.is_stack else "vmalloc", 0))
        blocks = stack_blocks(image, coverage["stacks"])
        self.stacks_are_blocks = bool(blocks)
        if blocks:
            hidden = (thread_size(image) >> mem_map(image).page_shift) - 1
            self._uses |= dict.fromkeys(blocks, ("stack", hidden))
        pgds = hidden_pgd_pages(image, coverage["page_tables"])
        self._uses |= dict.fromkeys(pgds, ("other", 1))
        if not self._has_large_kmalloc:
            pages = _other_compound_pages(image, coverage["compound"])
            self._uses |= dict.fromkeys(pages, ("other", 0))

    def of(self, kmem: KmemPage) -> tuple[str, int]:
        """Return the use of a charged page, and the number of pages in the block that it begins."""
        is_large = kmem.compound and not self._has_large_kmalloc
        use, hidden = self._uses.get(kmem.page, ("large_kmalloc" if is_large else "other", 0))
        if kmem.type or kmem.compound:
            hidden = 0  # the order is in the page
        return kmem.type or use, (1 << kmem.order) + hidden


def _other_compound_pages(image: Image, coverage: Coverage) -> set[int]:
    """
    Find the charged compound pages that are not large kmallocs.

    Kernels without ``PGTY_large_kmalloc`` do not mark the pages of a large kmalloc. So all other
    users of charged compound pages are read.
    """
    pages: set[int] = set()
    for find in (io_uring_pages, unix_socket_pages):
        try:
            for page in find(image, coverage):
                coverage.read += 1
                pages.add(page)
        except FaultError as error:
            coverage.miss("owners of compound pages", error.address, str(error))
    return pages
