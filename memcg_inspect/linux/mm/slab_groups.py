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
from collections.abc import Callable, Iterator
from operator import itemgetter

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage, SlabPages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import SlabCache, SlabReader, SlabShape, payers

__all__ = ("SlabGroupReader", "SlabGroup")

#: The most bytes between two vectors that are read at once, and the most that are read at once.
_GAP, _MOST = 4096, 1 << 20
#: Elements of vectors of all groups that are kept until they are counted.
_MOST_WORDS = 1 << 16
#: Kinds of slabs that are remembered.
_MOST_KINDS = 1 << 14


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
    :ivar words: elements of vectors that are not counted in it yet
    """

    __slots__ = (
        "cache", "charged", "inuse", "nid", "objects", "outside", "pages", "slabs", "words",
    )  # fmt: skip

    def __init__(self, cache: SlabCache, nid: int) -> None:
        self.cache, self.nid = cache, nid
        self.slabs = self.pages = self.objects = self.inuse = 0
        self.outside: list[tuple[int, int]] = []
        self.charged: Counter[int] = Counter()
        self.words: list[int] = []

    def count(self) -> None:
        """Count the charged objects in :attr:`words`."""
        self.charged.update(payers(self.words))
        self.words = []


class _Kind:
    """
    Slabs of one node that have the same order and shape.

    :ivar is_other: whether they are to be read one by one
    :ivar offset: bytes from ``obj_exts`` to the first ``struct obj_cgroup *``; ``None`` if no
        slab of this kind has any
    :ivar step: words from one ``struct obj_cgroup *`` to the next
    :ivar span: bytes from the first of them to the end of the last one
    :ivar group: the group that the slabs of the piece are added to, if there are any
    :ivar slabs: number of slabs of the piece that were added to it
    """

    __slots__ = (
        "cache", "group", "inuse", "is_other", "nid", "objects", "offset", "pages", "slabs", "span",
        "step",
    )  # fmt: skip

    def __init__(self, page: SlabPage, shape: SlabShape, is_other: bool, word: int) -> None:
        self.cache, self.objects, self.inuse, elements = shape
        self.nid, self.pages = page.nid, 1 << page.order
        self.is_other, self.slabs = is_other or not self.objects, 0
        self.group: SlabGroup | None = None
        self.offset: int | None = None
        self.step = self.span = 0
        if elements is not None:
            self.offset, self.step = elements.offset, elements.stride // word
            self.span = elements.stride * (self.objects - 1) + word
            # A damaged cache has a size that is no multiple of a word.
            self.is_other |= bool((elements.offset | elements.stride) % word)

    def add_to_group(self) -> None:
        """Add the slabs of the piece to their group, and forget them."""
        group, slabs = self.group, self.slabs
        if group is not None:
            group.slabs += slabs
            group.pages += slabs * self.pages
            group.objects += slabs * self.objects
            group.inuse += slabs * self.inuse
        self.group, self.slabs = None, 0


#: A slab whose vector is not read yet: address and end of the vector, the number of the slab in its
#: piece, its kind and its group.
_Waiting = tuple[int, int, int, _Kind, SlabGroup]


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
        self._kinds: dict[tuple[int, ...], _Kind] = {}

    def read(self, pages: SlabPages) -> tuple[list[SlabGroup], list[SlabPage]]:
        """
        Add up slabs.

        :param pages: slabs of one piece
        :return: the groups, and the slabs that are not in them. They have to be read one by one:
            those of a cache that is to be, slabs of KFENCE, and what is unreadable or damaged
        """
        groups: dict[tuple[int, int], SlabGroup] = {}
        used, waiting, others = self._sorted_out(pages, groups)
        kept = 0
        for run, end in _runs(waiting):
            others += self._read(pages, run, end)
            kept += sum(one[3].objects for one in run)
            if kept > _MOST_WORDS:
                kept = 0
                for group in groups.values():
                    group.count()
        for kind in used:
            kind.add_to_group()
        for group in groups.values():
            group.count()
            self._slabs.coverage.read += group.slabs
        left = [pages[number] for number in sorted(others)]
        return [group for group in groups.values() if group.slabs], left

    def _sorted_out(
        self, pages: SlabPages, groups: dict[tuple[int, int], SlabGroup]
    ) -> tuple[list[_Kind], list[_Waiting], list[int]]:
        """
        Find the group of each slab, and count the slabs that have no vector.

        :param groups: the groups are added to it, by ``struct kmem_cache *`` and node
        :return: the kinds of slabs in groups, those with a vector, and those to be read one by one
        """
        used: list[_Kind] = []
        waiting: list[_Waiting] = []
        others: list[int] = []
        first, size = pages.address, pages.size
        kinds, kfence, indexes = self._kinds, self._kfence, pages.indexes
        for number, (key, exts) in enumerate(self._slabs.alike(pages)):
            kind = kinds.get(key) or self._kind(pages[number], key)
            if kind is None or kind.is_other or first + indexes[number] * size in kfence:
                others.append(number)
                continue
            group = kind.group
            if group is None:
                found = groups.get((kind.cache.address, kind.nid))
                group = kind.group = found or SlabGroup(kind.cache, kind.nid)
                groups[kind.cache.address, kind.nid] = group
                used.append(kind)
            if not exts or kind.offset is None:
                kind.slabs += 1
                continue
            address = exts + kind.offset
            waiting.append((address, address + kind.span, number, kind, group))
        return used, waiting, others

    def _kind(self, page: SlabPage, key: tuple[int, ...]) -> _Kind | None:
        """Return the kind of a slab; ``None`` if it cannot be read."""
        if page.page in self._kfence:
            return None
        try:
            shape = self._slabs.shape(page)
        except FaultError:
            return None
        kind = _Kind(page, shape, self._is_other(shape.cache), self._memory.word_size)
        # Others may look the same and have a cache; see SlabReader.alike().
        if shape.objects and shape.cache.address:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            self._kinds[key] = kind
        return kind

    def _is_other(self, cache: SlabCache) -> bool:
        found = self._alone.get(cache.address)
        if found is None:
            found = self._alone[cache.address] = self._is_alone(cache)
        return found

    def _read(self, pages: SlabPages, run: list[_Waiting], end: int) -> list[int]:
        """
        Add the vectors of a run to their groups.

        :param end: where the last of them ends
        :return: the slabs whose vectors are unreadable, by number
        """
        start, word = run[0][0], self._memory.word_size
        try:
            words = self._memory.array(self._memory.read(start, end - start))
        except FaultError:
            return [one[2] for one in run]
        indexes, size = pages.indexes, self._frames.page_size
        # The pages of a piece follow each other, and so does their memory.
        virt = self._frames.virt(pages.address)
        for address, after, number, kind, group in run:
            found = words[(address - start) // word : (after - start) // word : kind.step]
            group.words += found.tolist()
            kind.slabs += 1
            index = indexes[number]
            if not 0 <= address - virt - index * size < size * kind.pages:
                group.outside.append((pages.address + index * pages.size, address))
        return []


def _runs(waiting: list[_Waiting]) -> Iterator[tuple[list[_Waiting], int]]:
    """
    Group slabs whose vectors lie near each other.

    :return: such slabs, sorted by the address of the vector, and the end of the last vector
    """
    run: list[_Waiting] = []
    last = start = 0
    for one in sorted(waiting, key=itemgetter(0)):
        address, end = one[0], one[1]
        if run and (address > last + _GAP or end > start + _MOST):
            yield run, last
            run = []
        if not run:
            start = last = address
        run.append(one)
        last = max(last, end)
    if run:
        yield run, last
