# SPDX-License-Identifier: LGPL-2.1-or-later
"""What charged pages are used for where the pages themselves do not tell."""

from __future__ import annotations

from collections import defaultdict

from drgn import Program

from memcg_inspect.linux.arch.x86 import hidden_pgd_pages
from memcg_inspect.linux.mm.mm_types import KmemPage, page_layout
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.vmalloc import stack_blocks, thread_size, vm_areas
from memcg_inspect.linux.net.compound import other_compound_pages
from memcg_inspect.model import Coverage

__all__ = ("PageUses",)


class PageUses:
    """
    Found from the owners of pages, before all pages are gone over.

    :ivar are_blocks: whether kernel stacks are blocks of pages, and no vmalloc areas
    """

    def __init__(self, prog: Program, coverage: defaultdict[str, Coverage]) -> None:
        # Where nothing marks large kmallocs, they are the compound pages of no other user.
        self._has_large_kmalloc = page_layout(prog).has_large_kmalloc
        self._uses: dict[int, tuple[str, int]] = {}
        for area in vm_areas(prog, coverage["vmalloc"], coverage["stacks"]):
            self._uses |= dict.fromkeys(area.pages, ("stack" if area.is_stack else "vmalloc", 0))
        blocks = stack_blocks(prog, coverage["stacks"])
        self.are_blocks = bool(blocks)
        if blocks:
            hidden = (thread_size(prog) >> mem_map(prog).page_shift) - 1
            self._uses |= dict.fromkeys(blocks, ("stack", hidden))
        pgds = hidden_pgd_pages(prog, coverage["page_tables"])
        self._uses |= dict.fromkeys(pgds, ("other", 1))
        if not self._has_large_kmalloc:
            pages = other_compound_pages(prog, coverage["compound"])
            self._uses |= dict.fromkeys(pages, ("other", 0))

    def of(self, kmem: KmemPage) -> tuple[str, int]:
        """Return what a charged page is used for, and how many pages it stands for."""
        is_large = kmem.compound and not self._has_large_kmalloc
        use, hidden = self._uses.get(kmem.page, ("large_kmalloc" if is_large else "other", 0))
        if kmem.type or kmem.compound:
            hidden = 0  # the page tells its order itself
        return kmem.type or use, (1 << kmem.order) + hidden
