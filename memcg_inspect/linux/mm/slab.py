# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Slabs and the objcgs beside their objects
-----------------------------------------

Mirrors :linux:`mm/slab.h` and :linux:`mm/slub.c`. Where the ``obj_cgroup`` pointer
of an object lies has changed often; :class:`SlabReader` knows all the ways:

* 6.1: a separate array of ``struct obj_cgroup *``.
* 6.10: a separate array of ``struct slabobj_ext`` (commit 21c690a349ba, "mm: introduce
  slabobj_ext to support slab object extensions").
* 7.2: as before, or in the slab's leftover space, or inside each object; the distance of
  two elements is in ``slab->stride``.
* 7.3: ``struct slabobj_ext`` is one word, an objcg or a codetag; an object owns none, one
  or two of them, told by ``slab->obj_exts_needs_objcg`` and by whether allocation
  profiling has tags at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from memcg_inspect.linux.mm.kfence import kfence_object, kfence_pages
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_FLAGS, SlabPage
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import NUMA_NO_NODE, Coverage, ImageError, SlabUsage

__all__ = (
    "CODETAG_EMPTY",
    "SlabObject",
    "Slab",
    "SlabCache",
    "SlabLayout",
    "SlabReader",
    "SlabTally",
    "Vector",
    "slab_layout",
)

#: ``SLAB_RECLAIM_ACCOUNT`` while it was a macro, before commit cc61eb851461 ("mm, slab: use
#: an enum to define SLAB_ cache creation flags") (in v6.9).
SLAB_RECLAIM_ACCOUNT = 0x00020000
#: In place of a codetag, where there is none on purpose.
CODETAG_EMPTY = 1


class SlabCache(NamedTuple):
    """
    What accounting needs of a ``struct kmem_cache``.

    :ivar size: bytes from one object to the next, metadata included
    :ivar object_size: bytes the user of the cache asked for
    :ivar reclaimable: whether its objects count as ``NR_SLAB_RECLAIMABLE_B``
    :ivar charge: bytes charged for one object, ``obj_full_size()``
    """

    address: int
    name: str
    size: int
    object_size: int
    red_left_pad: int
    reclaimable: bool
    charge: int


class _CacheMembers(NamedTuple):
    """Where things are in a ``struct kmem_cache``."""

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
    Where the objcgs of a slab's objects are.

    :ivar address: address of the first ``struct obj_cgroup *``
    :ivar stride: bytes from one to the next
    """

    address: int
    stride: int


class Slab(NamedTuple):
    """
    One slab.

    :ivar page: ``struct slab *``
    :ivar objects: number of objects it has room for
    :ivar inuse: number of objects its allocator counts as taken; includes those that
        wait in per-CPU caches
    :ivar vector: ``None`` where no object has ever been charged
    :ivar charged: number of charged objects by ``struct obj_cgroup *``; ``None`` if the
        vector could not be read
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


class SlabObject(NamedTuple):
    """
    A slab object with an objcg.

    :ivar number: its index in the slab
    :ivar element: address of its ``struct obj_cgroup *``
    """

    address: int
    number: int
    slab: Slab
    objcg: int
    element: int


class SlabLayout(NamedTuple):
    """
    Where things are in a ``struct slab``.

    :ivar exts: ``obj_exts``, before 6.10 ``memcg_data``
    :ivar element: ``sizeof(struct slabobj_ext)``, before 6.10 of a pointer
    :ivar objcg: offset of the objcg in an element
    :ivar codetag: offset of the codetag in an element of an object that has no objcg; ``None``
        where there are none
    :ivar stride: 7.2: the distance of two elements
    :ivar in_object, needs_objcg: 7.3: the flags that tell it
    :ivar has_codetag: 7.3: elements are followed by one for the codetag
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
    Find the layout of ``struct slab`` and its object extensions.

    :raises ImageError: if slab objects of this kernel carry no objcg
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
        # Renamed when the codetag moved into an element of its own (7.3).
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


class SlabReader:
    """
    Reads slabs and what their objects are charged to.

    :ivar caches: the caches met so far, by ``struct kmem_cache *``
    :ivar coverage: slabs read and slabs whose objcgs could not be read
    :ivar names: names of caches that could not be read; their addresses are told instead
    """

    def __init__(self, image: Image, names: Coverage | None = None) -> None:
        """:param names: to be used as :attr:`names`"""
        self.image = image
        self.names = Coverage() if names is None else names
        self.memory = image.memory
        self.frames = mem_map(image)
        self._kfence = kfence_pages(image)
        self.layout = slab_layout(image)
        self._words = self.memory.unpacker(
            sizeof(image.type("struct slab")) // self.memory.word_size
        )
        self.caches: dict[int, SlabCache] = {}
        self.coverage = Coverage()
        self._nids: dict[int, int] = {}
        self._members = _CacheMembers.of(image)
        # Never read whole: it is as long as there are nodes, its type as long as there may be.
        self._cache_words = max(f.word for f in self._members if f is not None) + 1
        self._unpack_cache = self.memory.unpacker(self._cache_words)
        self._names = Strings(self.memory)
        bit = constant(image, "_SLAB_RECLAIM_ACCOUNT")
        self._reclaimable = SLAB_RECLAIM_ACCOUNT if bit is None else 1 << bit
        # A page of kfence that was never used has no objects, and something else stands where
        # its cache would.
        self._no_cache = SlabCache(0, "(no cache)", 0, 0, 0, False, self.memory.word_size)

    def cache(self, address: int) -> SlabCache:
        """
        Return a cache.

        :param address: ``struct kmem_cache *``
        :raises drgn.FaultError: if it cannot be read
        """
        found = self.caches.get(address)
        if found is None:
            members = self._members
            words = self._unpack_cache(
                self.memory.read(address, self._cache_words * self.memory.word_size)
            )
            size, pad = members.size.get(words), members.red_left_pad
            try:
                name = self._names.at(members.name.get(words))
            except FaultError as error:
                self.names.miss("name of a kmem_cache", address, str(error))
                name = f"kmem_cache {address:#x}"
            found = self.caches[address] = SlabCache(
                address=address,
                name=name,
                size=size,
                object_size=members.object_size.get(words),
                red_left_pad=0 if pad is None else pad.get(words),
                reclaimable=bool(members.flags.get(words) & self._reclaimable),
                # A constant: charged also where the vector costs nothing, and no more
                # where elements are longer.
                charge=size + self.memory.word_size,
            )
        return found

    def slab(self, found: SlabPage) -> Slab | None:
        """
        Read a slab and count its charged objects.

        :return: ``None`` if not even its cache can be read; the failure is counted
        """
        layout, words = self.layout, self._words(found.raw)
        objects = layout.objects.get(words)
        try:
            cache = self.cache(layout.cache.get(words)) if objects else self._no_cache
        except FaultError as error:
            self.coverage.miss("kmem_cache of a slab", found.page, str(error))
            return None
        vector = self._vector(words, cache)
        charged: Mapping[int, int] | None = {}
        if vector is not None and objects:
            try:
                charged = self._count(vector, objects)
            except FaultError as error:
                self.coverage.miss(f"objcgs of a {cache.name} slab", vector.address, str(error))
                charged = None
        if charged is not None:
            self.coverage.read += 1
        page, nid, order, raw = found
        inuse = layout.inuse.get(words)
        return Slab(page, nid, order, cache, objects, inuse, vector, charged, raw)

    def codetags(self, slab: Slab) -> Vector | None:
        """Return where the tags of the objects' call sites are; ``None`` where there are none."""
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
        # The tag is in the element behind the objcg's, if there is one.
        needs_objcg = layout.needs_objcg.get(words)
        in_object = layout.in_object is not None and layout.in_object.get(words)
        stride = slab.cache.size if in_object else layout.element * (1 + needs_objcg)
        return Vector(exts + layout.codetag + layout.element * needs_objcg, stride)

    def codetag(self, slab: Slab, number: int) -> int:
        """
        Return the call site of an object.

        :param number: its index in the slab
        :return: ``struct codetag *``; 0 if it refers to none
        :raises drgn.FaultError: if that cannot be read
        """
        vector = self.codetags(slab)
        if vector is None:
            return 0
        codetag = self.memory.word(vector.address + number * vector.stride)
        return codetag if codetag > CODETAG_EMPTY else 0

    def tagged(self, slab: Slab) -> Mapping[tuple[int, int], int]:
        """
        Count the objects of a slab that refer to a call site.

        :return: by ``struct codetag *`` and ``struct obj_cgroup *``, 0 if no memcg pays
        :raises drgn.FaultError: if the tags cannot be read
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
        Walk the charged objects of a slab.

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
        """Return the addresses of all objects of a slab, taken or free."""
        first = self._first_object(slab)
        for number in range(slab.objects):
            yield first + number * slab.cache.size

    def number(self, slab: Slab, address: int) -> int | None:
        """Return the index of the object at an address; ``None`` if it is in none of them."""
        if not slab.cache.size:
            return None
        number = (address - self._first_object(slab)) // slab.cache.size
        return number if 0 <= number < slab.objects else None

    def address(self, slab: Slab, number: int) -> int:
        """Return the address of an object, by its index."""
        return self._first_object(slab) + number * slab.cache.size

    def objcg(self, slab: Slab, number: int) -> int:
        """
        Return whom an object is charged to.

        :param number: its index in the slab
        :return: ``struct obj_cgroup *``; 0 for nobody
        :raises drgn.FaultError: if that cannot be read
        """
        if slab.vector is None:
            return 0
        word = self.memory.word(slab.vector.address + number * slab.vector.stride)
        return word & ~MEMCG_DATA_FLAGS

    def _first_object(self, slab: Slab) -> int:
        start = self.frames.virt(slab.page)
        if slab.page not in self._kfence:
            return start + slab.cache.red_left_pad
        # kfence_guarded_alloc() aligns half of its objects to the end of their page.
        try:
            thing = kfence_object(self.image, slab.page)
        except FaultError:
            return start
        return start if thing is None else thing.address

    def vector_page(self, slab: Slab) -> int | None:
        """
        Return the page that a slab's vector begins on.

        :return: ``struct page *``; ``None`` if the vector is inside the slab itself
        """
        return None if slab.vector is None else self.page_of(slab, slab.vector)

    def page_of(self, slab: Slab, vector: Vector) -> int | None:
        """
        Return the page that a vector of a slab begins on.

        :return: ``struct page *``; ``None`` if it is inside the slab itself
        """
        page = self.frames.virt_to_page(vector.address)
        inside = slab.page <= page < slab.page + (self.frames.size << slab.order)
        return None if inside else page

    def page_nid(self, page: int) -> int:
        """
        Return the node of a page, or ``NUMA_NO_NODE`` if it cannot be told.

        :param page: ``struct page *``
        """
        nid = self._nids.get(page)
        if nid is None:
            try:
                nid = self.frames.nid(self.memory.word(page + self.frames.flags))
            except FaultError:
                nid = NUMA_NO_NODE
            self._nids[page] = nid
        return nid

    def _exts(self, words: Sequence[int]) -> int:
        # Masked first, tested for NULL afterwards: that handles OBJEXTS_ALLOC_FAIL in all
        # its versions.
        return self.layout.exts.get(words) & ~MEMCG_DATA_FLAGS

    def _vector(self, words: Sequence[int], cache: SlabCache) -> Vector | None:
        layout, exts = self.layout, self._exts(words)
        if not exts:
            return None
        if layout.needs_objcg is not None:
            if not layout.needs_objcg.get(words):
                return None  # the elements are codetags
            if layout.in_object is not None and layout.in_object.get(words):
                return Vector(exts + layout.objcg, cache.size)
            return Vector(exts + layout.objcg, layout.element * (1 + layout.has_codetag))
        if layout.stride is not None:
            # 0 on slabs of kfence, which hold one object.
            stride = layout.stride.get(words) or layout.element
            return Vector(exts + layout.objcg, stride)
        return Vector(exts + layout.objcg, layout.element)

    def _objcgs(self, vector: Vector, objects: int) -> list[int]:
        return [word & ~MEMCG_DATA_FLAGS for word in self._elements(vector, objects)]

    def _elements(self, vector: Vector, objects: int) -> list[int]:
        word = self.memory.word_size
        data = self.memory.read(vector.address, vector.stride * (objects - 1) + word)
        return self.memory.words(data, 0, vector.stride)

    def _count(self, vector: Vector, objects: int) -> Mapping[int, int]:
        counts = Counter(self._elements(vector, objects))
        if any(word & MEMCG_DATA_FLAGS for word in counts):
            counts = Counter(word & ~MEMCG_DATA_FLAGS for word in counts.elements())
        counts.pop(0, None)
        return counts


class _Sum:
    """What the slabs of a cache on a node amount to; those in the pool of kfence apart."""

    __slots__ = ("cache", "charged", "inuse", "objects", "pages", "slabs")

    def __init__(self, cache: SlabCache) -> None:
        self.cache = cache
        self.slabs = self.pages = self.objects = self.inuse = 0
        self.charged: int | None = 0


class SlabTally:
    """Adds slabs up by node and cache."""

    def __init__(self, image: Image) -> None:
        self._kfence = kfence_pages(image)
        self._sums: dict[tuple[int, int, bool], _Sum] = {}

    def add(self, slab: Slab) -> None:
        """Add a slab."""
        key = slab.nid, slab.cache.address, slab.page in self._kfence
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = _Sum(slab.cache)
        found.slabs += 1
        found.pages += 1 << slab.order
        found.objects += slab.objects
        found.inuse += slab.inuse
        if slab.charged is None:
            found.charged = None
        elif slab.charged and found.charged is not None:
            found.charged += sum(slab.charged.values())

    def usage(self) -> tuple[SlabUsage, ...]:
        """Return what was added up, by node and name of the cache."""
        usage = [
            SlabUsage(
                nid=nid,
                cache=found.cache.name,
                address=address,
                reclaimable=found.cache.reclaimable,
                kfence=kfence,
                size=found.cache.size,
                charge=found.cache.charge,
                slabs=found.slabs,
                pages=found.pages,
                objects=found.objects,
                inuse=found.inuse,
                charged=found.charged,
            )
            for (nid, address, kfence), found in self._sums.items()
        ]
        return tuple(sorted(usage, key=lambda u: (u.nid, u.cache, u.address)))
