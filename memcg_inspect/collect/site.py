# SPDX-License-Identifier: LGPL-2.1-or-later
"""Call site of one slab object, percpu allocation or page."""

from __future__ import annotations

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.alloc_tag import read_call_site, why_not_profiled
from memcg_inspect.linux.mm.percpu import PcpuArea
from memcg_inspect.linux.mm.pgalloc_tag import PageTagReader
from memcg_inspect.linux.mm.slab import CODETAG_EMPTY, Slab, SlabReader
from memcg_inspect.model import CallSite, Coverage

__all__ = ("SiteFinder",)


class SiteFinder:
    """
    Finds the call site of an allocation, on kernels that profile allocations.

    :ivar why_not: why this kernel has no call sites; ``None`` if it has
    :ivar coverage: counts the call sites read
    """

    def __init__(self, image: Image) -> None:
        self.why_not = why_not_profiled(image)
        self.coverage = Coverage()
        self._image = image
        self._slabs: SlabReader | None = None
        self._pages: PageTagReader | None = None
        self._known: dict[int, CallSite | None] = {}

    def of_slab_object(self, slab: Slab, number: int) -> CallSite | None:
        """
        Return the call site of a slab object.

        :param number: index of the object in the slab
        :return: ``None`` if it is unknown
        """
        if self.why_not:
            return None
        self._slabs = self._slabs or SlabReader(self._image)
        try:
            return self._at(self._slabs.codetag(slab, number))
        except FaultError as error:
            self.coverage.miss("codetag of a slab object", error.address, str(error))
            return None

    def of_percpu(self, area: PcpuArea) -> CallSite | None:
        """Return the call site of a percpu allocation; ``None`` if it is unknown."""
        return None if self.why_not else self._at(area.codetag)

    def of_page(self, page: int) -> CallSite | None:
        """
        Return the call site of a block of pages.

        :param page: first ``struct page *`` of the block
        :return: ``None`` if it is unknown
        """
        if self.why_not:
            return None
        self._pages = self._pages or PageTagReader(self._image)
        try:
            return self._at(self._pages.codetag(page))
        except FaultError as error:
            self.coverage.miss("codetag of a page", error.address, str(error))
            return None

    def _at(self, codetag: int) -> CallSite | None:
        if codetag <= CODETAG_EMPTY:
            return None
        if codetag not in self._known:
            self._known[codetag] = read_call_site(self._image, codetag, self.coverage)
        return self._known[codetag]
