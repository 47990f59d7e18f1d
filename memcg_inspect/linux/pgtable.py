# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Page tables that are blocks of pages
------------------------------------

Mirrors :linux:`arch/x86/mm/pgtable.c`.
"""

from __future__ import annotations

from drgn import FaultError, Program

from memcg_inspect.linux.layout import has_type
from memcg_inspect.linux.list import list_entries
from memcg_inspect.model import Coverage

__all__ = ("hidden_pgd_pages",)


def hidden_pgd_pages(prog: Program, coverage: Coverage) -> set[int]:
    """
    Return the first pages of PGDs whose second page no field records.

    On x86 a kernel built with page-table isolation allocated PGDs as blocks of two pages,
    whether the CPU needs it or not. Newer kernels take a second page only if it does, and
    give PGDs a page type and, as compound pages, their order: such pages tell it themselves.

    :return: ``struct page *`` addresses
    """
    pages: set[int] = set()
    try:
        head = prog["pgd_list"].address_of_()  # x86 has it, no other architecture does
        prog.symbol("__pti_set_user_pgtbl")  # built with page-table isolation
    except LookupError:
        return pages
    # struct ptdesc overlays struct page since 6.6.
    if has_type(prog, "struct ptdesc"):
        link = ("struct ptdesc", "pt_list")
    else:
        link = ("struct page", "lru")

    def missed(error: FaultError) -> None:
        coverage.miss("list of page tables", error.address, str(error))

    for page in list_entries(link[0], head, link[1], missed):
        pages.add(page.value_())
        coverage.read += 1
    return pages
