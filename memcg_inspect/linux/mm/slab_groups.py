# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Slabs of one cache and node
---------------------------

A machine has millions of slabs (:linux:`mm/slab.h`), and few caches. :class:`SlabGroupReader`
adds up the slabs of a piece of the memory map by cache and node. It reads vectors that lie near
each other at once, and counts the objects of a whole group at once, so that there is little work
for each slab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import SlabPage
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabCache, SlabReader, payers

__all__ = ("SlabGroupReader", "SlabGroup")

#: The most bytes between two vectors that are read at once, and the most that are read at once.
_GAP, _MOST = 4096, 1 << 20
#: Elements of vectors of all groups that are kept until they are counted.
_MOST_WORDS = 1 << 16


class SlabGroup:
    """
    Slabs of one cache on one node.

    :ivar cache: the cache
    :ivar nid: node
    :ivar slabs: number of slabs
    :ivar pages: number of their pages
    :ivar objects: sum of ``slab->objects``
    :ivar inuse: sum of ``slab->inuse``
    :ivar outside: ``struct slab *``, and the address of the vector, of the slabs whose vector is
        not inside the slab
    :ivar charged: number of charged objects by ``struct obj_cgroup *``
    """

    __slots__ = (
        "_words", "cache", "charged", "inuse", "nid", "objects", "outside", "pages", "slabs",
    )  # fmt: skip

    def __init__(self, cache: SlabCache, nid: int) -> None:
        self.cache, self.nid = cache, nid
        self.slabs = self.pages = self.objects = self.inuse = 0
        self.outside: list[tuple[int, int]] = []
        self.charged: Counter[int] = Counter()
        self._words: list[int] = []

    def add(self, page: SlabPage, objects: int, inuse: int) -> None:
        """Add a slab."""
        self.slabs += 1
        self.pages += 1 << page.order
        self.objects += objects
        self.inuse += inuse

    def add_vector(self, words: list[int]) -> None:
        """Add the elements of the vector of a slab."""
        self._words += words

    def count(self) -> None:
        """Count the charged objects in the vectors that were added."""
        self.charged.update(payers(self._words))
        self._words = []


#: A slab whose vector is not read yet: address of the vector, a number that no other slab has, end
#: of the vector, its stride, the slab, its group, ``slab->objects`` and ``slab->inuse``.
_Waiting = tuple[int, int, int, int, SlabPage, SlabGroup, int, int]


class SlabGroupReader:
    """Reader of the slabs of a piece of the memory map."""

    def __init__(
        self, image: Image, slabs: SlabReader, is_alone: Callable[[SlabCache], bool]
    ) -> None:
        """
        :param slabs: counts the slabs that were read
        :param is_alone: returns whether the slabs of a cache are to be read one by one
        """
        self._memory = image.memory
        self._slabs = slabs
        self._is_alone = is_alone
        self._alone: dict[int, bool] = {}
        self._kfence = kfence_pages(image)
        self._frames = mem_map(image)

    def read(self, pages: Iterable[SlabPage]) -> tuple[list[SlabGroup], list[SlabPage]]:
        """
        Add up slabs.

        :param pages: slabs of one piece
        :return: the groups, and the slabs that are not in them. They have to be read one by one:
            those of a cache that is to be, slabs of KFENCE, and what is unreadable or damaged
        """
        groups: dict[tuple[int, int], SlabGroup] = {}
        others: list[SlabPage] = []
        waiting: list[_Waiting] = []
        word, shape_of, kfence = self._memory.word_size, self._slabs.shape, self._kfence
        for page in pages:
            if page.page in kfence:
                others.append(page)
                continue
            try:
                (cache, objects, inuse, elements), exts = shape_of(page)
            except FaultError:
                others.append(page)
                continue
            if not objects or self._is_other(cache):
                others.append(page)
                continue
            group = groups.get((cache.address, page.nid))
            if group is None:
                group = groups[cache.address, page.nid] = SlabGroup(cache, page.nid)
            if not exts or elements is None:
                group.add(page, objects, inuse)
                continue
            address, stride = exts + elements.offset, elements.stride
            if (address | stride) % word:  # of a damaged cache
                others.append(page)
                continue
            end = address + stride * (objects - 1) + word
            waiting.append((address, len(waiting), end, stride, page, group, objects, inuse))
        kept = 0
        for run in _runs(waiting):
            others += self._read(run)
            kept += sum(one[6] for one in run)
            if kept > _MOST_WORDS:
                kept = 0
                for group in groups.values():
                    group.count()
        for group in groups.values():
            group.count()
            self._slabs.coverage.read += group.slabs
        return [group for group in groups.values() if group.slabs], others

    def _is_other(self, cache: SlabCache) -> bool:
        found = self._alone.get(cache.address)
        if found is None:
            found = self._alone[cache.address] = self._is_alone(cache)
        return found

    def _read(self, run: list[_Waiting]) -> list[SlabPage]:
        """Add the vectors of a run to their groups; return the slabs whose are unreadable."""
        start, word = run[0][0], self._memory.word_size
        try:
            data = self._memory.read(start, max(one[2] for one in run) - start)
        except FaultError:
            return [one[4] for one in run]
        words = self._memory.array(data)
        size, virt = self._frames.page_size, self._frames.virt
        for address, _, end, stride, page, group, objects, inuse in run:
            elements = words[(address - start) // word : (end - start) // word : stride // word]
            group.add(page, objects, inuse)
            group.add_vector(elements.tolist())
            if not 0 <= address - virt(page.page) < size << page.order:
                group.outside.append((page.page, address))
        return []


def _runs(waiting: list[_Waiting]) -> Iterator[list[_Waiting]]:
    """Return slabs whose vectors lie near each other, sorted by the address of the vector."""
    run: list[_Waiting] = []
    last = start = 0
    for one in sorted(waiting):
        address, end = one[0], one[2]
        if run and (address > last + _GAP or end > start + _MOST):
            yield run
            run = []
        if not run:
            start = last = address
        run.append(one)
        last = max(last, end)
    if run:
        yield run
