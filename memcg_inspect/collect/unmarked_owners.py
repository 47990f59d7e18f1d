# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Owners of pages that nothing marks
----------------------------------

These owners are found in slabs, or name any memory that they have, also such that is marked. So
they are asked for the pages that nothing marks, after all others. What they name and what is marked
in another way is no conflict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from drgn import FaultError

from memcg_inspect.collect.slab_owners import SlabOwners
from memcg_inspect.image.image import Image
from memcg_inspect.linux.drivers.virtio_ring import virtqueue_rings
from memcg_inspect.linux.fs import pipe
from memcg_inspect.linux.kernel.events import ring_buffer as perf
from memcg_inspect.linux.kernel.sched_frag import task_fragments
from memcg_inspect.linux.kernel.trace.ring_buffer import ring_buffer_pages
from memcg_inspect.linux.kernel.vmcore_info import vmcoreinfo_pages
from memcg_inspect.linux.mm.mm_init import hash_tables
from memcg_inspect.linux.mm.mm_types import page_layout
from memcg_inspect.linux.mm.mmzone import mem_map, memory_map_end
from memcg_inspect.linux.mm.slub_large import large_kmallocs
from memcg_inspect.linux.mm.swap_cgroup import swap_cgroup_pages
from memcg_inspect.linux.net.skbuff import socket_fragments, unix_socket_pages
from memcg_inspect.model import Coverage

__all__ = ("UnmarkedOwners",)


class UnmarkedOwners:
    """
    Finder of the owners of pages that nothing marks.

    :param in_slabs: owners that were found in slabs
    """

    def __init__(
        self, image: Image, in_slabs: SlabOwners, coverage: defaultdict[str, Coverage]
    ) -> None:
        self._image, self._frames, self._coverage = image, mem_map(image), coverage
        self._end = memory_map_end(image)
        self._socks, self._files = in_slabs.socks, in_slabs.files

    def find(self) -> dict[int, str]:
        """Return a kind of :data:`memcg_inspect.model_pages.KINDS` by page frame number."""
        image, coverage, found = self._image, self._coverage, dict[int, str]()
        frags = coverage["page_frags"]
        pipes = set[int]().union(*(self._files.get(name, ()) for name in pipe.FILE_OPERATIONS))
        pages: tuple[tuple[str, Callable[[], Iterable[int]]], ...] = (
            ("pipe", lambda: pipe.pipe_pages(image, pipes, coverage["pipes"])),
            ("pipe", lambda: pipe.spare_pages(image, pipes, coverage["pipes"])),
            ("swap_cgroup", lambda: swap_cgroup_pages(image, coverage["swap"])),
            ("page_frag", lambda: socket_fragments(image, self._socks, frags)),
            ("page_frag", lambda: unix_socket_pages(image, frags)),
            ("page_frag", lambda: task_fragments(image, frags)),
        )
        for kind, read in pages:
            found |= dict.fromkeys(map(self._frames.pfn, self._as_far_as_readable(read)), kind)
        for kind, read in self._addresses():
            for address in self._as_far_as_readable(read):
                pfn = self._frames.pfn(self._frames.virt_to_page(address))
                # Others are of vmalloc areas, or of the kernel's image.
                if 0 <= pfn < self._end:
                    found[pfn] = kind
        return found

    def _addresses(self) -> Iterator[tuple[str, Callable[[], Iterable[int]]]]:
        """Return the owners that give addresses, with the kind of their pages."""
        image, coverage = self._image, self._coverage
        events = self._files.get(perf.FILE_OPERATIONS, set())
        yield "trace", lambda: ring_buffer_pages(image, coverage["ftrace"])
        yield "perf", lambda: perf.perf_pages(image, events, coverage["perf"])
        yield "virtqueue", lambda: virtqueue_rings(image, coverage["virtqueues"])
        yield "hash_table", lambda: hash_tables(image, coverage["hash_tables"])
        yield "vmcoreinfo", lambda: vmcoreinfo_pages(image, coverage["vmcoreinfo"])
        if not page_layout(image).has_large_kmalloc:
            yield "large_kmalloc", lambda: large_kmallocs(image, coverage["large_kmallocs"])

    def _as_far_as_readable(self, read: Callable[[], Iterable[int]]) -> Iterator[int]:
        """Yield what an owner has. If it cannot all be read, the rest has no known owner."""
        try:
            yield from read()
        except FaultError as error:
            self._coverage["owners"].miss("owner of pages", error.address, str(error))
