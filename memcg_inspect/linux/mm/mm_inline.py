# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sizes of LRU lists
------------------

Mirrors ``update_lru_size()``, ``lru_gen_update_size()`` and ``folio_lru_list()`` of
:linux:`include/linux/mm_inline.h`, and ``struct lruvec`` of :linux:`include/linux/mmzone.h`.

A folio with ``PG_lru`` is on one list of the lruvec of its memcg and node. The generation in the
flags of the folio tells which kind of list that is:

- 0: one of ``lruvec->lists``. ``mem_cgroup_per_node.lru_zone_size`` counts their pages, by zone
  and list;
- other values: one of ``lrugen->folios`` of the multi-gen LRU (since 6.1). ``lrugen->nr_pages``
  counts their pages, by generation, type and zone.

Both counters change under the lock of the lruvec, together with the lists. One exception: a page
table walk of the multi-gen LRU changes the flags of folios at once, and ``nr_pages`` when it adds
its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product

from drgn import FaultError, Object, Type, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member, member_type
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.mm.mm_types import LruFlags
from memcg_inspect.linux.mm.mmzone import mem_map, zone_types
from memcg_inspect.linux.mm.page_flags import lru_generations, page_flags
from memcg_inspect.model import Coverage
from memcg_inspect.model_counters import CounterWord

__all__ = ("LruReader", "Sizes")

#: Enumerators for ``is_file`` of ``False`` and ``True``.
_TYPES = ("LRU_GEN_ANON", "LRU_GEN_FILE")
#: How many lists are checked to see that the generation is read from the right bits.
_MOST_SAMPLES = 256

#: Number of pages, by name of a list and by the member that counts them.
Sizes = dict[str, dict[str, int]]


class LruReader:
    """
    Reader of the sizes of LRU lists.

    :param coverage: counts the lruvecs that were read, and those that are unreadable
    :ivar walks: counts the page table walks whose batches are unreadable
    :ivar by_generation: whether the generation in the flags of a folio is found; if not, lists
        of the multi-gen LRU are told apart by type and zone only
    :ivar item: function from the zone and the :class:`LruFlags` of a folio on a list to the name
        of the list
    """

    def __init__(self, image: Image, coverage: Coverage) -> None:
        self.image = image
        self.memory = image.memory
        self.coverage = coverage
        self.walks = Coverage()
        self.by_generation = True
        self._has_generations = page_flags(image).generation is not None
        self._zones = zone_types(image)
        self._lists = _enumerators(image.type("enum lru_list"), "NR_LRU_LISTS")
        self._zone_lists = len(self._zones) * len(self._lists)
        pn = image.type("struct mem_cgroup_per_node")
        self._size = sizeof(pn)
        self._lruvec = offsetof(pn, "lruvec")
        self._zone_size = offsetof(pn, "lru_zone_size")
        if self._has_generations:
            self._generations = lru_generations(image)
            lrugen = member_type(image.type("struct lruvec"), "lrugen")
            # Commit 6df1b2212950 ("mm: multi-gen LRU: rename lrugen->lists[] to
            # lrugen->folios[]") (in v6.3).
            folios = "folios" if lrugen.has_member("folios") else "lists"
            start = self._lruvec + offsetof(image.type("struct lruvec"), "lrugen")
            self._nr_pages = start + offsetof(lrugen, "nr_pages")
            self._folios = start + offsetof(lrugen, folios)

    def item(self, zone: int, flags: LruFlags) -> str:
        """Return the name of the list that a folio is on, ``folio_lru_list()``."""
        kind = "ANON" if flags.swapbacked else "FILE"
        if not self.by_generation and not flags.unevictable:
            return self._type_item(zone, kind == "FILE")
        if flags.generation:
            return self._generation_item(flags.generation - 1, kind == "FILE", zone)
        if flags.unevictable:
            return self._list_item(zone, "LRU_UNEVICTABLE")
        return self._list_item(zone, f"LRU_{'ACTIVE' if flags.active else 'INACTIVE'}_{kind}")

    def _list_item(self, zone: int, name: str) -> str:
        return f"lru_zone_size[{self._zone(zone)}][{name}]"

    def _generation_item(self, generation: int, is_file: bool, zone: int) -> str:
        return f"lrugen.nr_pages[{generation}][{_TYPES[is_file]}][{self._zone(zone)}]"

    def _type_item(self, zone: int, is_file: bool) -> str:
        return f"all lists of {_TYPES[is_file]} in {self._zone(zone)}"

    def _zone(self, zone: int) -> str:
        return self._zones.get(zone, str(zone))

    def sizes(self, lruvecs: Mapping[tuple[int, int], Object]) -> dict[tuple[int, int], Sizes]:
        """
        Read the sizes of all lists that are not empty.

        :param lruvecs: ``struct mem_cgroup_per_node *`` by address of the memcg and node
        :return: number of pages by memcg and node, list, and member that counts them
            (``lru_zone_size``, ``nr_pages``, ``mm_walk``); unreadable lruvecs are left out
        """
        raw: dict[tuple[int, int], tuple[int, bytes]] = {}
        for key, pn in lruvecs.items():
            try:
                raw[key] = pn.value_(), self.memory.read(pn.value_(), self._size)
                self.coverage.read += 1
            except FaultError as error:
                self.coverage.miss("sizes of LRU lists", error.address, str(error))
        sizes: dict[tuple[int, int], Sizes] = {key: {} for key in raw}
        if self._has_generations:
            self.by_generation = self._generations_are_right(raw.values())
            for key, (_, data) in raw.items():
                for item, pages in self._nr_pages_of(data):
                    _add(sizes[key], item, "nr_pages", pages)
            if any(sizes.values()) and self.by_generation:
                self._add_batches(sizes, {pn + self._lruvec: key for key, (pn, _) in raw.items()})
        for key, (_, data) in raw.items():
            for item, pages in self._zone_sizes(data):
                _add(sizes[key], item, "lru_zone_size", pages)
        return sizes

    def _zone_sizes(self, data: bytes) -> Iterator[tuple[str, int]]:
        # unsigned long lru_zone_size[MAX_NR_ZONES][NR_LRU_LISTS]
        for slot, pages in self._not_zero(data, self._zone_size, self._zone_lists):
            zone, number = divmod(slot, len(self._lists))
            name = self._lists[number]
            if self.by_generation or name == "LRU_UNEVICTABLE":
                yield self._list_item(zone, name), pages
            else:
                yield self._type_item(zone, name.endswith("FILE")), pages

    def _nr_pages_of(self, data: bytes) -> Iterator[tuple[str, int]]:
        for slot, pages in self._not_zero(data, self._nr_pages, len(self._each_list)):
            generation, is_file, zone = self._each_list[slot]
            if self.by_generation:
                yield self._generation_item(generation, is_file, zone), pages
            else:
                yield self._type_item(zone, is_file), pages

    def _not_zero(self, data: bytes, offset: int, length: int) -> list[tuple[int, int]]:
        """Return the index and the value of the elements of an array of ``long`` that are not 0."""
        values = self.memory.unpacker(length, signed=True)(data, offset)
        return [(slot, value) for slot, value in enumerate(values) if value]

    def words(self, pn: Object) -> Iterator[CounterWord]:
        """
        Yield the words that the sizes of all lists of a memcg on a node are in.

        :param pn: ``struct mem_cgroup_per_node *``
        """
        word, address = self.memory.word_size, pn.value_() + self._zone_size
        for zone in range(len(self._zones)):
            for number, name in self._lists.items():
                at = address + (zone * len(self._lists) + number) * word
                yield CounterWord("lists", self._list_item(zone, name), at, word)
        if self._has_generations:
            address = pn.value_() + self._nr_pages
            for slot, (generation, is_file, zone) in enumerate(self._each_list):
                item = self._generation_item(generation, is_file, zone)
                yield CounterWord("lists", item, address + slot * word, word)

    @cached_property
    def _each_list(self) -> list[tuple[int, bool, int]]:
        """
        Generation, type and zone of each list, in the order of the arrays.

        The arrays are ``[MAX_NR_GENS][ANON_AND_FILE][MAX_NR_ZONES]``.
        """
        return list(product(range(self._generations), (False, True), range(len(self._zones))))

    def _generations_are_right(self, lruvecs: Iterable[tuple[int, bytes]]) -> bool:
        # The width of each field of the page flags is a macro, and is derived from types. Check
        # the result: the first folio of each list must have a generation, and most have that of
        # their list. Not all do: folio_update_gen() changes the flags of a folio that was
        # accessed, and sort_folio() moves it to the other list later.
        same = total = 0
        for pn, data in lruvecs:
            for generation, in_flags in self._first_folios(pn, data):
                if not 1 <= in_flags <= self._generations:
                    return False
                same += in_flags == generation + 1
                total += 1
            if total >= _MOST_SAMPLES:
                break
        return 2 * same >= total

    def _first_folios(self, pn: int, data: bytes) -> Iterator[tuple[int, int]]:
        """Return the generation of each list, and the field in the flags of its first folio."""
        bits = page_flags(self.image).generation
        if bits is None:
            return
        lru = offsetof(self.image.type("struct page"), "lru")
        flags, size = mem_map(self.image).flags, 2 * self.memory.word_size  # struct list_head
        heads = range(pn + self._folios, pn + self._folios + size * len(self._each_list), size)
        firsts = self.memory.unpacker(2 * len(heads))(data, self._folios)[::2]
        for (generation, _, _), head, first in zip(self._each_list, heads, firsts, strict=True):
            if first in (0, head):
                continue
            try:
                yield generation, bits.get(self.memory.word(first - lru + flags))
            except FaultError as error:
                self.coverage.miss("first folio of an LRU list", error.address, str(error))

    def _add_batches(
        self, sizes: dict[tuple[int, int], Sizes], lruvecs: Mapping[int, tuple[int, int]]
    ) -> None:
        """
        Add the batches of page table walks, ``struct lru_gen_mm_walk``.

        Such a walk (``walk_mm()``) promotes folios at once, and collects the changes of
        ``nr_pages`` until ``reset_batch_size()`` adds them.
        """
        if not has_member(self.image, "struct reclaim_state", "mm_walk"):
            return

        def missed(error: FaultError) -> None:
            self.walks.miss("walk of page tables", error.address, str(error))

        for task in find_tasks(self.image, missed):
            try:
                state = task.reclaim_state.read_()
                walk = state.mm_walk.read_() if state else None
                if not walk or walk.lruvec.value_() not in lruvecs:
                    continue
                batch, lists = walk.nr_pages.to_bytes_(), self._each_list
                size = len(batch) // len(lists)
                for offset, (generation, is_file, zone) in zip(
                    range(0, len(batch), size), lists, strict=True
                ):
                    number = batch[offset : offset + size]
                    pages = int.from_bytes(number, self.memory.order, signed=True)
                    if pages:
                        item = self._generation_item(generation, is_file, zone)
                        _add(sizes[lruvecs[walk.lruvec.value_()]], item, "mm_walk", pages)
            except FaultError as error:
                missed(error)


def _add(sizes: Sizes, item: str, member: str, pages: int) -> None:
    members = sizes.setdefault(item, {})
    members[member] = members.get(member, 0) + pages


def _enumerators(type_: Type, end: str) -> dict[int, str]:
    """Return the names of the enumerators below *end*, by value."""
    values = {e.name: e.value for e in type_.enumerators or ()}
    return {value: name for name, value in values.items() if 0 <= value < values[end]}
