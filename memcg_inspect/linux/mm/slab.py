# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Slabs and their objcgs
----------------------

Mirrors :linux:`mm/slab.h` and :linux:`mm/slub.c`. A slab has a vector with an element for each
object, which holds the ``struct obj_cgroup *`` that the object is charged to.

What differs between kernel releases:

- up to 6.9, the vector is an array of ``struct obj_cgroup *``;
- since 6.10, it is an array of ``struct slabobj_ext`` (commit 21c690a349ba, "mm: introduce
  slabobj_ext to support slab object extensions");
- since 7.0, it may also be in the unused space of the slab (commit 70089d018807, "mm/slab: save
  memory by allocating slabobj_ext array from leftover"), or inside the objects. ``slab->stride`` is
  the distance of two elements;
- since 7.3, ``struct slabobj_ext`` is one word, which is an objcg or a codetag. An object has none,
  one or two of them. ``slab->obj_exts_needs_objcg`` shows whether it has an objcg, and a static key
  whether it has a codetag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import (
    WordField,
    constant,
    has_member,
    static_key_enabled,
    word_field,
)
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.strings import Strings
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.mm.kfence import KfenceObject, kfence_object, kfence_pages
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_FLAGS
from memcg_inspect.linux.mm.mm_types_slabs import SlabPage, SlabPages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import NUMA_NO_NODE, Coverage, ImageError

__all__ = (
    "CODETAG_EMPTY",
    "SlabObject",
    "Slab",
    "SlabCache",
    "SlabLayout",
    "SlabReader",
    "SlabShape",
    "Vector",
    "payers",
    "slab_layout",
)

#: ``SLAB_RECLAIM_ACCOUNT`` while it was a macro, before commit cc61eb851461 ("mm, slab: use
#: an enum to define SLAB_ cache creation flags") (in v6.9).
SLAB_RECLAIM_ACCOUNT = 0x00020000
#: ``SLAB_ACCOUNT`` while it was a macro.
SLAB_ACCOUNT = 0x04000000
#: ``CODETAG_EMPTY``: the reference to a call site is empty on purpose.
CODETAG_EMPTY = 1


class SlabCache(NamedTuple):
    """
    One ``struct kmem_cache``.

    :ivar address: ``struct kmem_cache *``
    :ivar name: its name
    :ivar size: ``size``: bytes from one object to the next, metadata included
    :ivar object_size: ``object_size``: bytes of an object without metadata
    :ivar red_left_pad: ``red_left_pad``: bytes before each object
    :ivar reclaimable: whether its objects count as ``NR_SLAB_RECLAIMABLE_B``
    :ivar charge: bytes charged for one object, ``obj_full_size()``
    :ivar accounts: ``SLAB_ACCOUNT``: whether its objects are charged without ``__GFP_ACCOUNT``.
        Caches ``kmalloc-cg-*`` have it, too
    """

    address: int
    name: str
    size: int
    object_size: int
    red_left_pad: int
    reclaimable: bool
    charge: int
    accounts: bool = False


class _CacheMembers(NamedTuple):
    """Members of ``struct kmem_cache``."""

    name: WordField
    size: WordField
    object_size: WordField
    flags: WordField
    red_left_pad: WordField | None

    @classmethod
    def of(cls, image: Image) -> _CacheMembers:
        def field(member: str) -> WordField:
            return word_field(image, "struct kmem_cache", member)

        pad = "red_left_pad"
        return cls(
            name=field("name"),
            size=field("size"),
            object_size=field("object_size"),
            flags=field("flags"),
            red_left_pad=field(pad) if has_member(image, "struct kmem_cache", pad) else None,
        )


class Vector(NamedTuple):
    """
    An array of pointers, one for each object of a slab, e.g. ``struct obj_cgroup *``.

    :ivar address: address of the first pointer
    :ivar stride: bytes from one pointer to the next
    """

    address: int
    stride: int


class Slab(NamedTuple):
    """
    One slab.

    :ivar page: ``struct slab *``
    :ivar nid: node
    :ivar order: the slab has ``1 << order`` pages
    :ivar cache: its cache
    :ivar objects: ``slab->objects``
    :ivar inuse: ``slab->inuse``, which includes free objects in per-CPU caches
    :ivar vector: ``struct obj_cgroup *`` of the objects; ``None`` if no object was ever charged
    :ivar charged: number of charged objects by ``struct obj_cgroup *``; ``None`` if the vector is
        unreadable
    :ivar raw: the bytes of its ``struct slab``
    """

    page: int
    nid: int
    order: int
    cache: SlabCache
    objects: int
    inuse: int
    vector: Vector | None
    charged: Mapping[int, int] | None
    raw: bytes


class Elements(NamedTuple):
    """
    Where the ``struct obj_cgroup *`` of the objects of a slab are.

    :ivar offset: bytes from ``obj_exts`` to that of the first object
    :ivar stride: bytes from one to the next
    """

    offset: int
    stride: int


class SlabShape(NamedTuple):
    """
    What slabs that look alike have in common.

    :ivar cache: the cache
    :ivar objects: ``slab->objects``
    :ivar inuse: ``slab->inuse``
    :ivar elements: where the objcgs are if the slab has ``obj_exts``; ``None`` if it has none
    """

    cache: SlabCache
    objects: int
    inuse: int
    elements: Elements | None


class SlabObject(NamedTuple):
    """
    One charged slab object.

    :ivar address: address of the object
    :ivar number: its index in the slab, ``obj_to_index()``
    :ivar slab: its slab
    :ivar objcg: ``struct obj_cgroup *``
    :ivar element: address of the ``struct obj_cgroup *`` in the vector of the slab
    """

    address: int
    number: int
    slab: Slab
    objcg: int
    element: int


class SlabLayout(NamedTuple):
    """
    The layout of ``struct slab`` and of the vector of its objects.

    :ivar cache: ``slab_cache``
    :ivar exts: ``obj_exts``, up to 6.9 ``memcg_data``
    :ivar objects: ``objects``
    :ivar inuse: ``inuse``
    :ivar element: ``sizeof(struct slabobj_ext)``, up to 6.9 the size of a pointer, in bytes
    :ivar objcg: offset of the objcg in an element, in bytes
    :ivar codetag: offset of the codetag in an element, in bytes; ``None`` if there is none
    :ivar stride: ``stride`` (7.0): bytes from one element to the next
    :ivar in_object: ``obj_exts_in_object`` (7.3): the elements are inside the objects
    :ivar needs_objcg: ``obj_exts_needs_objcg`` (7.3): objects have an element for the objcg
    :ivar has_codetag: whether objects have an element for the codetag (7.3)
    """

    cache: WordField
    exts: WordField
    objects: WordField
    inuse: WordField
    element: int
    objcg: int
    codetag: int | None
    stride: WordField | None
    in_object: WordField | None
    needs_objcg: WordField | None
    has_codetag: bool


@per_image
def slab_layout(image: Image) -> SlabLayout:
    """
    Find the layout of ``struct slab`` and ``struct slabobj_ext``.

    :raises ImageError: if the kernel does not charge slab objects to memcgs
    """

    def field(member: str) -> WordField:
        return word_field(image, "struct slab", member)

    def optional(member: str) -> WordField | None:
        return field(member) if slab.has_member(member) else None

    try:
        slab = image.type("struct slab")
    except UnknownKernelError:
        raise ImageError("there is no struct slab: this kernel is older than 5.17") from None
    codetag = None
    if slab.has_member("obj_exts"):
        exts = field("obj_exts")
        ext = image.type("struct slabobj_ext")
        element = sizeof(ext)
        # Renamed in 7.3, which gives the codetag an element of its own.
        objcg = offsetof(ext, "_objcg" if ext.has_member("_objcg") else "objcg")
        tag = "_ctref" if ext.has_member("_ctref") else "ref"
        codetag = offsetof(ext, tag) if ext.has_member(tag) else None
    elif slab.has_member("memcg_data"):
        exts, element, objcg = field("memcg_data"), image.memory.word_size, 0
    else:
        raise ImageError("struct slab has no obj_exts: slab objects are not charged to memcgs")
    return SlabLayout(
        cache=field("slab_cache"),
        exts=exts,
        objects=field("objects"),
        inuse=field("inuse"),
        element=element,
        objcg=objcg,
        codetag=codetag,
        stride=optional("stride"),
        in_object=optional("obj_exts_in_object"),
        needs_objcg=optional("obj_exts_needs_objcg"),
        has_codetag=bool(static_key_enabled(image, "slab_obj_ext_has_codetag_key")),
    )


def _cache_flag(image: Image, name: str, macro: int) -> int:
    """
    Return a flag of ``kmem_cache.flags``.

    :param macro: its value before there was an enum of flags
    :return: 0 if the kernel does not have it: ``SLAB_RECLAIM_ACCOUNT`` with ``CONFIG_SLUB_TINY``
    """
    bit = constant(image, f"_{name}")
    if bit is not None:
        return 1 << bit
    return 0 if constant(image, "_SLAB_CONSISTENCY_CHECKS") is not None else macro


def _is_freed(of_kfence: KfenceObject | None) -> bool:
    return of_kfence is not None and of_kfence.state == "freed"


class SlabReader:
    """
    Reader of slabs and of who pays for their objects.

    :ivar caches: the caches that were read so far, by ``struct kmem_cache *``
    :ivar coverage: counts the slabs that were read, and those whose objcgs are unreadable
    :ivar names: counts the names of caches that could not be read; addresses are used instead
    :ivar unnamed: why the name of a cache could not be read, by ``struct kmem_cache *``
    """

    def __init__(self, image: Image, names: Coverage | None = None) -> None:
        """:param names: used as :attr:`names` if given"""
        self.image = image
        self.names = Coverage() if names is None else names
        self.memory = image.memory
        self.frames = mem_map(image)
        self._kfence = kfence_pages(image)
        self.layout = slab_layout(image)
        self._words = self.memory.unpacker(
            sizeof(image.type("struct slab")) // self.memory.word_size
        )
        layout = self.layout
        fields = [layout.cache, layout.objects, layout.inuse]
        fields += filter(None, (layout.stride, layout.in_object, layout.needs_objcg))
        self._alike = sorted({field.word for field in fields})
        self.caches: dict[int, SlabCache] = {}
        self.unnamed: dict[int, str] = {}
        self.coverage = Coverage()
        self._members = _CacheMembers.of(image)
        # Do not read the whole structure: it ends with node[MAX_NUMNODES], but memory is allocated
        # for nr_node_ids nodes only.
        self._cache_words = max(f.word for f in self._members if f is not None) + 1
        self._unpack_cache = self.memory.unpacker(self._cache_words)
        self._names = Strings(self.memory)
        self._reclaimable = _cache_flag(image, "SLAB_RECLAIM_ACCOUNT", SLAB_RECLAIM_ACCOUNT)
        self._accounts = _cache_flag(image, "SLAB_ACCOUNT", SLAB_ACCOUNT)
        # A page of KFENCE that was never used looks like a slab without objects. Its slab_cache is
        # not set.
        self._no_cache = SlabCache(0, "(no cache)", 0, 0, 0, False, self.memory.word_size)

    def cache(self, address: int) -> SlabCache:
        """
        Return a cache. It is read once.

        :param address: ``struct kmem_cache *``
        :raises drgn.FaultError: if the cache cannot be read. An unreadable name is not an error
        """
        found = self.caches.get(address)
        if found is None:
            members = self._members
            words = self._unpack_cache(
                self.memory.read(address, self._cache_words * self.memory.word_size)
            )
            size, pad = members.size.get(words), members.red_left_pad
            # Objects are aligned to a pointer at least, calculate_alignment().
            if size < self.memory.word_size:
                raise FaultError(f"a kmem_cache of objects of {size} bytes", address)
            try:
                name = self._names.at(members.name.get(words))
            except FaultError as error:
                self.names.miss("name of a kmem_cache", address, str(error))
                self.unnamed[address] = str(error)
                name = f"kmem_cache {address:#x}"
            found = self.caches[address] = SlabCache(
                address=address,
                name=name,
                size=size,
                object_size=members.object_size.get(words),
                red_left_pad=0 if pad is None else pad.get(words),
                reclaimable=bool(members.flags.get(words) & self._reclaimable),
                # obj_full_size(): the size of a pointer is charged for each object, also if the
                # vector needs no memory, or if its elements are larger.
                charge=size + self.memory.word_size,
                accounts=bool(members.flags.get(words) & self._accounts),
            )
        return found

    def slab(self, found: SlabPage) -> Slab | None:
        """
        Read a slab and count its charged objects.

        :return: ``None`` if its cache is unreadable, or cannot be its cache, which
            :attr:`coverage` counts
        """
        layout, words = self.layout, self._words(found.raw)
        try:
            cache, objects = self._cache_and_objects(found, words)
        except FaultError as error:
            self.coverage.miss("kmem_cache of a slab", found.page, str(error))
            return None
        vector, charged = None, None
        try:
            vector = self._vector(words, cache)
            charged = self._count(vector, objects) if vector is not None and objects else {}
        except FaultError as error:
            self.coverage.miss(f"objcgs of a {cache.name} slab", error.address, str(error))
        if charged is not None:
            self.coverage.read += 1
        page, nid, order, raw = found
        inuse = layout.inuse.get(words)
        return Slab(page, nid, order, cache, objects, inuse, vector, charged, raw)

    def shape(self, found: SlabPage) -> SlabShape:
        """
        Return what the ``struct slab`` of a slab says, without a look at its objects.

        :param found: not a page of KFENCE
        :raises drgn.FaultError: if its cache is unreadable, or a field cannot be right
        """
        words = self._words(found.raw)
        cache, objects = self._cache_and_objects(found, words)
        elements = self._places(words, cache)
        return SlabShape(cache, objects, self.layout.inuse.get(words), elements)

    def alike(self, pages: SlabPages) -> Iterator[tuple[tuple[int, ...], int]]:
        """
        Return what the shape of each slab depends on, and its ``obj_exts`` without the flags.

        Slabs with equal numbers are on one node, and have the same order and the same
        :meth:`shape()`, unless it has no cache or no objects: that depends on ``obj_exts``, too.
        """
        words, size = self.memory.array(pages.raw()), pages.size // self.memory.word_size
        columns = [words[word::size].tolist() for word in self._alike]
        word, shift, mask = self.layout.exts
        mask &= ~(MEMCG_DATA_FLAGS >> shift)
        exts = [found >> shift & mask for found in words[word::size].tolist()]
        return zip(zip(pages.nids, pages.orders, *columns), exts)  # noqa: B905

    def _cache_and_objects(self, found: SlabPage, words: Sequence[int]) -> tuple[SlabCache, int]:
        """
        Return the cache of a slab, and the number of its objects.

        :raises drgn.FaultError: if its cache is unreadable, or cannot be its cache
        """
        objects, address = self.layout.objects.get(words), self.layout.cache.get(words)
        # allocate_slab() and __free_slab() mark a page as a slab before it has a cache, or after.
        is_empty = not objects or (not address and not self._exts(words))
        cache = self._no_cache if is_empty else self.cache(address)
        self._check_size(found, cache, objects)
        return cache, objects

    def _check_size(self, found: SlabPage, cache: SlabCache, objects: int) -> None:
        """
        Check that the objects fit into the slab.

        KFENCE keeps one object in a page of its own, of a cache whose ``size`` may be larger.

        :raises drgn.FaultError: if they do not
        """
        room = self.frames.page_size << found.order
        if objects and found.page not in self._kfence and objects * cache.size > room:
            raise FaultError(
                f"{objects} objects of {cache.size} bytes in a slab of {room} bytes", found.page
            )

    def codetags(self, slab: Slab) -> Vector | None:
        """
        Return the ``struct codetag *`` of the objects; ``None`` if they have none.

        :raises drgn.FaultError: if the distance of its elements cannot be right
        """
        layout = self.layout
        if layout.codetag is None:
            return None
        words = self._words(slab.raw)
        exts = self._exts(words)
        if not exts:
            return None
        if layout.needs_objcg is None:
            vector = self._vector(words, slab.cache)
            assert vector is not None
            return Vector(vector.address - layout.objcg + layout.codetag, vector.stride)
        if not layout.has_codetag:
            return None
        # The element of the codetag follows that of the objcg, if there is one.
        needs_objcg = layout.needs_objcg.get(words)
        in_object = layout.in_object is not None and layout.in_object.get(words)
        stride = slab.cache.size if in_object else layout.element * (1 + needs_objcg)
        return Vector(exts + layout.codetag + layout.element * needs_objcg, stride)

    def codetag(self, slab: Slab, number: int) -> int:
        """
        Return the call site of an object.

        :param number: index of the object in the slab
        :return: ``struct codetag *``; 0 for none
        :raises drgn.FaultError: if it cannot be read
        """
        vector = self.codetags(slab)
        if vector is None:
            return 0
        codetag = self.memory.word(vector.address + number * vector.stride)
        return codetag if codetag > CODETAG_EMPTY else 0

    def tagged(self, slab: Slab) -> Mapping[tuple[int, int], int]:
        """
        Count the objects of a slab that have a call site.

        :return: number of objects by ``struct codetag *`` and ``struct obj_cgroup *`` (0 if no
            memcg pays)
        :raises drgn.FaultError: if the call sites or the objcgs cannot be read
        """
        vector = self.codetags(slab)
        if vector is None or not slab.objects:
            return {}
        tags = self._elements(vector, slab.objects)
        payers = [0] * len(tags)
        if slab.vector is not None:
            payers = self._objcgs(slab.vector, slab.objects)
        return Counter(pair for pair in zip(tags, payers, strict=True) if pair[0] > CODETAG_EMPTY)

    def charged_objects(self, slab: Slab) -> Iterator[SlabObject]:
        """
        Iterate over the charged objects of a slab.

        :raises drgn.FaultError: if the vector cannot be read
        """
        if slab.vector is None or not slab.objects:
            return
        first = self._first_object(slab)
        for index, objcg in enumerate(self._objcgs(slab.vector, slab.objects)):
            if objcg:
                yield SlabObject(
                    address=first + index * slab.cache.size,
                    number=index,
                    slab=slab,
                    objcg=objcg,
                    element=slab.vector.address + index * slab.vector.stride,
                )

    def objects(self, slab: Slab) -> Iterator[int]:
        """
        Return the addresses of all objects of a slab, allocated or free.

        An object that KFENCE has freed is left out: it cannot be read.
        """
        of_kfence = self._of_kfence(slab)
        if _is_freed(of_kfence):
            return
        first = self._begin(slab, of_kfence)
        for number in range(slab.objects):
            yield first + number * slab.cache.size

    def has_freed(self, slab: Slab) -> bool:
        """
        Return whether KFENCE has freed the object of a slab.

        ``kfence_guarded_free()`` marks it as freed, and then unmaps its page: an object that cannot
        be read and is not marked is missing in the image.
        """
        return _is_freed(self._of_kfence(slab))

    def number(self, slab: Slab, address: int) -> int | None:
        """
        Return the index of the object that an address is in.

        :return: ``None`` if the address is not in an object of the slab
        """
        if not slab.cache.size:
            return None
        start = self._first_object(slab)
        number = (untagged(self.image, address) - start) // slab.cache.size
        return number if 0 <= number < slab.objects else None

    def address(self, slab: Slab, number: int) -> int:
        """Return the address of the object at an index."""
        return self._first_object(slab) + number * slab.cache.size

    def objcg(self, slab: Slab, number: int) -> int:
        """
        Return who pays for an object.

        :param number: index of the object in the slab
        :return: ``struct obj_cgroup *``; 0 if no memcg pays
        :raises drgn.FaultError: if it cannot be read
        """
        if slab.vector is None:
            return 0
        word = self.memory.word(slab.vector.address + number * slab.vector.stride)
        return word & ~MEMCG_DATA_FLAGS

    def _first_object(self, slab: Slab) -> int:
        return self._begin(slab, self._of_kfence(slab))

    def _begin(self, slab: Slab, of_kfence: KfenceObject | None) -> int:
        """Return the address of the first object of a slab."""
        # kfence_guarded_alloc() aligns half of its objects to the end of their page.
        if of_kfence is not None:
            return of_kfence.address
        start = self.frames.virt(slab.page)
        return start if slab.page in self._kfence else start + slab.cache.red_left_pad

    def _of_kfence(self, slab: Slab) -> KfenceObject | None:
        """Return the object of KFENCE in a slab; ``None`` if there is none, or it is not known."""
        if slab.page not in self._kfence:
            return None
        try:
            return kfence_object(self.image, slab.page)
        except FaultError:
            return None

    def vector_page(self, slab: Slab) -> int | None:
        """
        Return the first page of the vector of a slab.

        :return: ``struct page *``; ``None`` if there is no vector, or if it is inside the slab
        """
        return None if slab.vector is None else self.page_of(slab, slab.vector)

    def page_of(self, slab: Slab, vector: Vector) -> int | None:
        """
        Return the first page of a vector of a slab.

        :return: ``struct page *``; ``None`` if the vector is inside the slab
        """
        page = self.frames.virt_to_page(vector.address)
        inside = slab.page <= page < slab.page + (self.frames.size << slab.order)
        return None if inside else page

    def page_nid(self, page: int) -> int:
        """
        Return the node of a page.

        :param page: ``struct page *``
        :return: ``NUMA_NO_NODE`` if the ``struct page`` cannot be read
        """
        try:
            return self.frames.nid(self.memory.word(page + self.frames.flags))
        except FaultError:
            return NUMA_NO_NODE

    def _exts(self, words: Sequence[int]) -> int:
        # The flags are masked before the test for NULL: OBJEXTS_ALLOC_FAIL, whose value differs
        # between releases, is a vector that could not be allocated.
        return self.layout.exts.get(words) & ~MEMCG_DATA_FLAGS

    def _vector(self, words: Sequence[int], cache: SlabCache) -> Vector | None:
        exts = self._exts(words)
        elements = self._places(words, cache) if exts else None
        return None if elements is None else Vector(exts + elements.offset, elements.stride)

    def _places(self, words: Sequence[int], cache: SlabCache) -> Elements | None:
        """
        Return where the ``struct obj_cgroup *`` are; ``None`` if all elements are codetags.

        :raises drgn.FaultError: if the distance of elements cannot be right
        """
        layout = self.layout
        if layout.needs_objcg is not None:
            if not layout.needs_objcg.get(words):
                return None
            if layout.in_object is not None and layout.in_object.get(words):
                return Elements(layout.objcg, cache.size)
            return Elements(layout.objcg, layout.element * (1 + layout.has_codetag))
        if layout.stride is not None:
            # 0 for slabs of KFENCE, which have one object.
            stride = layout.stride.get(words) or layout.element
            if stride not in (layout.element, cache.size):
                raise FaultError(f"a vector with an element in {stride} bytes", self._exts(words))
            return Elements(layout.objcg, stride)
        return Elements(layout.objcg, layout.element)

    def _objcgs(self, vector: Vector, objects: int) -> list[int]:
        return [word & ~MEMCG_DATA_FLAGS for word in self._elements(vector, objects)]

    def _elements(self, vector: Vector, objects: int) -> list[int]:
        word = self.memory.word_size
        data = self.memory.read(vector.address, vector.stride * (objects - 1) + word)
        return self.memory.words(data, 0, vector.stride)

    def _count(self, vector: Vector, objects: int) -> Mapping[int, int]:
        return payers(self._elements(vector, objects))


def payers(words: Iterable[int]) -> Counter[int]:
    """
    Count the objects of each payer.

    :param words: elements of vectors, with flags of ``enum objext_flags``
    :return: number of objects by ``struct obj_cgroup *``, without those that nobody pays for
    """
    counts = Counter(words)
    if any(word & MEMCG_DATA_FLAGS for word in counts):
        counts = Counter(word & ~MEMCG_DATA_FLAGS for word in counts.elements())
    counts.pop(0, None)
    return counts
