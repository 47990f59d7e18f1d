# SPDX-License-Identifier: LGPL-2.1-or-later
"""References to call sites, on kernels that profile allocations."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from drgn import FaultError

from memcg_inspect.checks.profile import Profile, Use
from memcg_inspect.collect.partial import Partial
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.alloc_tag import read_call_sites, read_left_behind
from memcg_inspect.linux.mm.mm_types import PagePiece
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.linux.mm.pgalloc_tag import PageTagReader
from memcg_inspect.linux.mm.slab import CODETAG_EMPTY, Slab, SlabReader
from memcg_inspect.model import Coverage

__all__ = ("CallSiteCounter", "CallSites")

#: Coverage without which references to call sites may be missing.
_SUBJECTS = (
    "pages", "slab_pages", "slab", "percpu", "call_sites", "slab_tags", "page_tags",
)  # fmt: skip


class CallSiteCounter:
    """Counts references to call sites in a range of page frames."""

    def __init__(self, image: Image) -> None:
        self._page_size = mem_map(image).page_size
        self._pages = PageTagReader(image)

    def add_pages(self, partial: Partial, piece: PagePiece) -> None:
        """Add the pages of a piece of the memory map."""
        self._pages.coverage = partial.coverage["page_tags"]
        for found in self._pages.read(piece):
            use = Use(found.codetag, found.kind, found.payer, found.nid)
            partial.use(use, found.pages * self._page_size, found.calls)

    def add_slab(self, partial: Partial, slab: Slab, slabs: SlabReader) -> None:
        """Add the objects of a slab."""
        coverage = partial.coverage["slab_tags"]
        try:
            tagged = slabs.tagged(slab)
        except FaultError as error:
            coverage.miss(f"codetags of a {slab.cache.name} slab", slab.page, str(error))
            return
        coverage.read += slabs.codetags(slab) is not None
        for (codetag, objcg), count in tagged.items():
            if slab.cache.accounts and not objcg:
                partial.uncharged[slab.cache.address, codetag] += count
            use = Use(codetag, "slab", objcg, slab.nid)
            partial.use(use, count * slab.cache.size, count)


class CallSites:
    """
    The call sites of an image, and the references to them.

    :ivar profile: the result
    """

    def __init__(self, image: Image, coverage: MutableMapping[str, Coverage]) -> None:
        self.profile = Profile()
        self._image = image
        self._coverage = coverage
        for subject in ("call_sites", "slab_tags", "page_tags"):
            coverage[subject] = Coverage()
        self.profile.sites = read_call_sites(image, coverage["call_sites"])

    def percpu(self, reader: PercpuReader) -> Callable[[PcpuArea], None]:
        """Return a function that adds one percpu allocation."""

        def add(area: PcpuArea) -> None:
            if area.codetag <= CODETAG_EMPTY:
                return
            calls = 1  # one call in all, split by node
            nodes = reader.data_nodes(area) + reader.metadata_nodes(area)
            for nid, size in nodes.items():
                self.profile.add(Use(area.codetag, "percpu", area.objcg, nid), size, calls)
                calls = 0
            self.profile.one_cpu[area.codetag] += area.size

        return add

    def finish(self, total: Partial) -> Profile:
        """
        Add the references from page frames, and complete the profile.

        :param total: partial result of the whole image
        """
        for use, amount in total.uses.items():
            self.profile.add(use, amount.bytes, amount.charges)
        self.profile.uncharged = total.uncharged
        unknown = self.profile.codetags() - self.profile.sites.keys()
        sites = self._coverage["call_sites"]
        self.profile.sites |= read_left_behind(self._image, unknown, sites)
        if any(total.coverage[name].unreadable for name in _SUBJECTS if name in total.coverage):
            self.profile.missing = "references to call sites are not all in the image"
        return self.profile
