# SPDX-License-Identifier: LGPL-2.1-or-later
"""The use of charged pages whose ``struct page`` does not show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from drgn import FaultError

from memcg_inspect.collect.node_uses import NodeUses
from memcg_inspect.image.image import Image
from memcg_inspect.linux.fs import pipe
from memcg_inspect.linux.fs.file_table import FileReader, OpenFile
from memcg_inspect.linux.io_uring import io_uring
from memcg_inspect.linux.mm.init_mm import top_table_pages
from memcg_inspect.linux.mm.mm_types import KmemPage, page_layout, scan_pages
from memcg_inspect.linux.mm.page_alloc import BlockReader
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.linux.mm.vmalloc import VmArea, stack_blocks, vm_areas
from memcg_inspect.linux.net.skbuff import unix_socket_pages
from memcg_inspect.model import Coverage

__all__ = (
    "CompoundOwners",
    "PageUses",
    "compound_pages_of_others",
    "keep_pages_of_others",
    "page_uses",
    "uses_of_areas",
)


class PageUses:
    """
    The uses of charged pages, found through the owners of the pages.

    :ivar stacks_are_blocks: whether kernel stacks are blocks of pages, not vmalloc areas
    :ivar on_nodes: the pages that nodes count, charged or not
    """

    def __init__(self, image: Image, coverage: defaultdict[str, Coverage]) -> None:
        # Without PGTY_large_kmalloc, compound pages of no other use are taken for large kmallocs.
        self._has_large_kmalloc = page_layout(image).has_large_kmalloc
        self._uses: dict[int, str] = {}
        areas = list(vm_areas(image, coverage["vmalloc"], coverage["stacks"]))
        self.on_nodes = NodeUses(image, areas, coverage["stacks"])
        self._uses |= uses_of_areas(areas)
        blocks = stack_blocks(image, coverage["stacks"])
        self.stacks_are_blocks = bool(blocks)
        self._uses |= dict.fromkeys(blocks, "stack")

    def may_be_of_others(self, kmem: KmemPage) -> bool:
        """Return whether :class:`CompoundOwners` tells if a page is a large kmalloc."""
        is_known = kmem.type or kmem.page in self._uses
        return kmem.compound and not self._has_large_kmalloc and not is_known

    def of(self, kmem: KmemPage, blocks: BlockReader) -> tuple[str, int]:
        """
        Return the use of a charged page, and the number of pages in the block that it begins.

        A page that :meth:`may_be_of_others` is taken for a large kmalloc.
        """
        is_large = kmem.compound and not self._has_large_kmalloc
        use = self._uses.get(kmem.page, "large_kmalloc" if is_large else "other")
        if kmem.type or kmem.compound:
            return kmem.type or use, 1 << kmem.order
        # Each page of a vmalloc area is charged by itself.
        is_single = use == "vmalloc" or (use == "stack" and not self.stacks_are_blocks)
        return use, 1 if is_single else 1 << blocks.order(kmem.page)


def page_uses(image: Image, coverage: defaultdict[str, Coverage]) -> PageUses:
    """Return the uses of charged pages. In a session, their owners are read once."""
    uses, found = image.keep(_page_uses)
    for subject, part in found.items():
        coverage[subject].add(part)
    return uses


def _page_uses(image: Image) -> tuple[PageUses, Mapping[str, Coverage]]:
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    return PageUses(image, coverage), coverage


def uses_of_areas(areas: Iterable[VmArea]) -> dict[int, str]:
    """Return the use of the pages of vmalloc areas by ``struct page *``."""
    return {page: "stack" if area.is_stack else "vmalloc" for area in areas for page in area.pages}


class CompoundOwners:
    """
    Finds the charged compound pages that are not large kmallocs.

    Kernels without ``PGTY_large_kmalloc`` do not mark the pages of a large kmalloc. So all other
    users of charged compound pages are read: rings of io_uring, buffers of AF_UNIX sockets, which
    ``splice()`` may have moved to pipes, and page tables that are blocks of pages.
    """

    def __init__(self, image: Image, slabs: SlabReader) -> None:
        self._image = image
        self._files = FileReader(image, slabs, io_uring.FILE_OPERATIONS, *pipe.FILE_OPERATIONS)

    def files(self, slab: Slab) -> set[OpenFile]:
        """
        Return the files in a slab that can own compound pages.

        :raises drgn.FaultError: if the slab cannot be read
        """
        return set(self._files.read(slab))

    def may_read(self, cache: SlabCache) -> bool:
        """Return whether slabs of a cache have files."""
        return self._files.may_read(cache)

    def pages(self, files: Iterable[OpenFile], coverage: Coverage) -> set[int]:
        """
        Return the first pages of the compound pages that files and sockets own.

        :param files: all files of the image, as :meth:`files` returns them
        :param coverage: counts what is unreadable
        :return: ``struct page *``. Pages that are not charged, or not compound, can be among them.
        """
        data: defaultdict[str, set[int]] = defaultdict(set)
        for file in files:
            # io_uring_release() clears private_data. Other files may have been closed.
            if file.is_open or file.operations == io_uring.FILE_OPERATIONS:
                data[file.operations].add(file.data)
        if not self._files.can_read:
            coverage.miss("cache of files", 0, "filp_cachep is not known")
        pipes = set[int]().union(*(data[name] for name in pipe.FILE_OPERATIONS))
        pages: set[int] = set()
        try:
            for found in (
                io_uring.io_uring_pages(self._image, data[io_uring.FILE_OPERATIONS], coverage),
                pipe.pipe_pages(self._image, pipes, coverage),
                unix_socket_pages(self._image, coverage),
                top_table_pages(self._image, coverage),
            ):
                for page in found:
                    coverage.read += 1
                    pages.add(page)
        except FaultError as error:
            coverage.miss("owners of compound pages", error.address, str(error))
        return pages


def compound_pages_of_others(image: Image, coverage: Coverage) -> set[int]:
    """
    Return the charged compound pages that are not large kmallocs, with a pass over all slabs.

    In a session, there is one pass.

    :param coverage: counts what is unreadable
    :return: as for :meth:`CompoundOwners.pages`; empty on kernels that mark large kmallocs
    """
    pages, found = image.keep(_pages_of_others)
    coverage.add(found)
    return pages


def keep_pages_of_others(image: Image, pages: set[int], coverage: Coverage) -> None:
    """Let :func:`compound_pages_of_others` of a session return what the pass of the audit found."""
    image.keep_as(_pages_of_others, (pages, coverage))


def _pages_of_others(image: Image) -> tuple[set[int], Coverage]:
    files: set[OpenFile] = set()
    coverage = Coverage()
    if page_layout(image).has_large_kmalloc:
        return set(), coverage
    slabs = SlabReader(image)
    owners = CompoundOwners(image, slabs)
    for piece in scan_pages(image):
        if piece.unreadable is not None:
            coverage.miss("files", piece.unreadable, "not in the image")
        for page in piece.slabs:
            slab = slabs.slab(page)
            if slab is None:
                coverage.miss("files", page.page, "the cache of a slab is not known")
                continue
            try:
                files |= owners.files(slab)
            except FaultError as error:
                coverage.miss("files", error.address, str(error))
    return owners.pages(files, coverage), coverage
