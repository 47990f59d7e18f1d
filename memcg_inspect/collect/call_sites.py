# SPDX-License-Identifier: LGPL-2.1-or-later
"""What refers to call sites, on kernels that profile allocations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

from drgn import FaultError

from memcg_inspect.checks.profile import Profile, Use
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.alloc_tag import read_call_sites, read_left_behind
from memcg_inspect.linux.mm.mm_types import PagePiece
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.linux.mm.pgalloc_tag import PageTagReader
from memcg_inspect.linux.mm.slab import CODETAG_EMPTY, Slab, SlabReader
from memcg_inspect.model import Coverage

__all__ = ("CallSites",)


class CallSites:
    """Is shown what a pass over the image meets, and adds it up by call site."""

    def __init__(
        self, image: Image, profile: Profile, coverage: MutableMapping[str, Coverage]
    ) -> None:
        self._image, self._profile = image, profile
        self._page_size = mem_map(image).page_size
        self._sites = coverage["call_sites"] = Coverage()
        self._slabs = coverage["slab_tags"] = Coverage()
        profile.sites = read_call_sites(image, self._sites)
        self._pages = PageTagReader(image)
        coverage["page_tags"], coverage["free_pages"] = self._pages.coverage, self._pages.free

    def piece(self, piece: PagePiece) -> None:
        """Add the pages of a piece of the memory map."""
        for found in self._pages.read(piece):
            use = Use(found.codetag, found.kind, found.payer, found.nid)
            self._profile.add(use, found.pages * self._page_size, found.calls)

    def slab(self, slab: Slab, slabs: SlabReader) -> None:
        """Add the objects of a slab."""
        try:
            tagged = slabs.tagged(slab)
        except FaultError as error:
            self._slabs.miss(f"codetags of a {slab.cache.name} slab", slab.page, str(error))
            return
        self._slabs.read += slabs.codetags(slab) is not None
        for (codetag, objcg), count in tagged.items():
            use = Use(codetag, "slab", objcg, slab.nid)
            self._profile.add(use, count * slab.cache.size, count)

    def percpu(self, reader: PercpuReader) -> Callable[[PcpuArea], None]:
        """Return what adds percpu allocations that a reader finds."""

        def seen(alloc: PcpuArea) -> None:
            if alloc.codetag <= CODETAG_EMPTY:
                return
            calls = 1  # one, told by where its parts are
            nodes = reader.data_nodes(alloc) + reader.metadata_nodes(alloc)
            for nid, size in nodes.items():
                self._profile.add(Use(alloc.codetag, "percpu", alloc.objcg, nid), size, calls)
                calls = 0
            self._profile.one_cpu[alloc.codetag] += alloc.size

        return seen

    def finish(self, coverage: Mapping[str, Coverage]) -> None:
        """Complete the profile when the pass is over."""
        unknown = self._profile.codetags() - self._profile.sites.keys()
        self._profile.sites |= read_left_behind(self._image, unknown, self._sites)
        subjects = (
            "pages", "slab_pages", "slab", "percpu", "call_sites", "slab_tags", "page_tags",
            "free_pages",
        )  # fmt: skip
        if any(coverage[name].unreadable for name in subjects if name in coverage):
            self._profile.missing = "what refers to call sites is not all in the image"
