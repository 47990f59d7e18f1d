# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What lies before an address
---------------------------

Where memory was overwritten, the object before it is a suspect: something may have written past its
end. It is looked for among the objects of a slab, and among percpu allocations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drgn import FaultError

from memcg_inspect.collect.site import SiteFinder
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.debug import page_behind, read_page
from memcg_inspect.linux.mm.percpu import PcpuPlace, PercpuReader
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.mm.slub import FreeObjects
from memcg_inspect.model import counted
from memcg_inspect.report import Diagnosis, Evidence

__all__ = ("with_neighbours",)


def with_neighbours(image: Image, diagnoses: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return diagnoses; those of overwritten memory with what lies before it as evidence."""
    if all(diagnosis.cause != "overwritten" for diagnosis in diagnoses):
        return tuple(diagnoses)
    neighbours = _Neighbours(image)
    return tuple(
        replace(diagnosis, evidence=(*diagnosis.evidence, before), evidence_total=None)
        if diagnosis.cause == "overwritten"
        and (before := neighbours.before(diagnosis.evidence[0].address)) is not None
        else diagnosis
        for diagnosis in diagnoses
    )


class _Neighbours:
    """Finds the object or the allocation before the one that has an address."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._slabs = SlabReader(image)
        self._free = FreeObjects(image, self._slabs)
        self._percpu = PercpuReader(image)
        self._sites = SiteFinder(image)

    def before(self, address: int) -> Evidence | None:
        """
        Return what lies before the object or the percpu allocation that has an address.

        :return: ``None`` if that is not known, or if it could not be read
        """
        try:
            found = self._object(address)
            return self._allocation(address) if found is None else found
        except FaultError:
            return None

    def _object(self, address: int) -> Evidence | None:
        page = page_behind(self._image, address)
        info = None if page is None else read_page(self._image, page)
        slab = None if info is None or info.slab is None else self._slabs.slab(info.slab)
        number = None if slab is None else self._slabs.number(slab, address)
        if slab is None or not number:
            return None  # the first object of a slab lies behind a page of anybody
        start = self._slabs.address(slab, number)
        site = self._sites.of_slab_object(slab, number - 1)
        return Evidence(
            address=self._slabs.address(slab, number - 1),
            kind="slab",
            nid=slab.nid,
            cache=slab.cache.name,
            objcg=self._slabs.objcg(slab, number - 1) or None,
            note=f"{self._state(slab, number - 1)}, {_before(address - start)}",
            site=None if site is None else site.place,
        )

    def _state(self, slab: Slab, number: int) -> str:
        try:
            is_free = self._free.is_free(slab, number)
        except FaultError:
            return "state not known"
        return "free" if is_free else "allocated"

    def _allocation(self, address: int) -> Evidence | None:
        for place in self._percpu.find(address):
            if place.cpu is not None and place.chunk is not None:
                found = self._before_place(place, address)
                if found is not None:
                    return found
        return None

    def _before_place(self, place: PcpuPlace, address: int) -> Evidence | None:
        assert place.chunk is not None
        here = self._percpu.alloc_at(place.chunk, place.offset)
        if here is None or not here.offset:
            return None
        start = address - (place.offset - here.offset)
        before = self._percpu.alloc_at(place.chunk, here.offset - 1)
        if before is None:
            note = f"free percpu memory, {_before(address - start)}"
            return Evidence(address=start - 1, kind="percpu", note=note)
        site = self._sites.of_percpu(before)
        return Evidence(
            address=start - before.size,
            kind="percpu",
            bytes=before.size,
            objcg=before.objcg or None,
            note=f"copy of CPU {place.cpu}, {_before(address - start)}",
            site=None if site is None else site.place,
        )


def _before(offset: int) -> str:
    if not offset:
        return "directly before the range"
    return f"before the range, which begins {counted(offset, 'bytes')} into the next one"
