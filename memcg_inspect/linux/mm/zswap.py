# SPDX-License-Identifier: LGPL-2.1-or-later
"""
zswap
-----

Mirrors ``struct zswap_entry`` of :linux:`mm/zswap.c`.

What differs between kernel releases:

- up to 6.8, a swap device has one red-black tree of entries;
- since commit 44c7c734a513 ("mm/zswap: split zswap rb-tree") (in v6.9), it has an array of them;
- since commit 796c2c23e14e ("zswap: replace RB tree with xarray") (in v6.10), the array is one of
  XArrays;
- up to 6.12, ``entry->objcg`` is set before the entry is put into a tree. Since commit b7c0ccdfbafd
  ("mm: zswap: support large folios in zswap_store()") (in v6.13), zswap_store_page() sets it
  afterwards, and charges the entry in between. Until then it has what the slot had before. What
  comes last, in all releases that have ``entry->lru`` (6.5), is that the entry goes on an LRU list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import bit_field, has_member, has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.memory import Blocks
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.lib.list import OnFault, list_entries, rbtree_entries
from memcg_inspect.linux.lib.xarray import xa_entries
from memcg_inspect.linux.mm.mm_types import MEMCG_DATA_FLAGS
from memcg_inspect.linux.mm.zpool import ZpoolReader, ZswapPart
from memcg_inspect.linux.mm.zsmalloc import ZsmallocObjects
from memcg_inspect.model import NUMA_NO_NODE, Coverage

__all__ = ("ZswapEntry", "ZswapPart", "ZswapReader", "zswap_cursors", "zswap_entry_cache")

#: ``ZSWAP_ADDRESS_SPACE_PAGES``: pages of a swap device that one tree is for.
ZSWAP_ADDRESS_SPACE_PAGES = 1 << 14


class ZswapEntry(NamedTuple):
    """
    One ``struct zswap_entry``.

    :ivar address: ``struct zswap_entry *``
    :ivar length: bytes of compressed data; that many bytes are charged
    :ivar handle: handle of the data, which the allocator of the pool gave
    :ivar objcg: ``struct obj_cgroup *``; 0 if no memcg pays
    :ivar pool: ``struct zswap_pool *``
    :ivar beyond: bytes at the end of the data that the obj_cgroup of another node pays for
        (per-node series)
    :ivar beyond_nid: node of that obj_cgroup
    :ivar listed: whether it is on an LRU list. If not, a task is storing it, freeing it or, up to
        6.8, writing it back; while it is being stored, *objcg* and *pool* may be anything.
    """

    address: int
    length: int
    handle: int
    objcg: int
    pool: int = 0
    beyond: int = 0
    beyond_nid: int = NUMA_NO_NODE
    listed: bool = True


class ZswapReader:
    """
    Reader of the zswap entries of all swap devices.

    :ivar coverage: counts the entries that were read, and parts of the trees that are unreadable
    :ivar placement: counts the entries whose data was found, and those whose data was not
    :ivar has_zswap: whether the kernel has zswap
    :ivar entry_size: ``sizeof(struct zswap_entry)``, in bytes; 0 without zswap
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.memory = image.memory
        # Entries lie in slabs, one near the other.
        self._near = image.memory if image.is_moving else Blocks(image.memory)
        self.coverage = Coverage()
        self.placement = Coverage()
        self.has_zswap = has_type(image, "struct zswap_entry")
        self.entry_size = 0
        if not self.has_zswap:
            return
        entry = image.type("struct zswap_entry")
        self.entry_size = sizeof(entry)
        self._length = offsetof(entry, "length")
        self._handle = offsetof(entry, "handle")
        self._objcg = offsetof(entry, "objcg")
        self._pool = offsetof(entry, "pool")
        self._lru = offsetof(entry, "lru") if entry.has_member("lru") else None
        # The project's own fixtures/patches/7.3-pernode/0009: an entry may be on two nodes.
        self._split = [
            bit_field(image, "struct zswap_entry", member)
            for member in ("beyond", "beyond_nid")
            if entry.has_member(member)
        ]
        self._zpools = ZpoolReader(image)
        # Up to 6.17 the kernel may have no zsmalloc, or have it as a module.
        self._zsmalloc: ZsmallocObjects | None = None

    def entries(self) -> Iterator[ZswapEntry]:
        """Iterate over all entries."""
        if not self.has_zswap:
            return
        for address in self.addresses():
            try:
                yield self.entry(address)
            except FaultError as error:
                self.coverage.miss("zswap entry", address, str(error))
                continue
            self.coverage.read += 1

    def entry(self, address: int) -> ZswapEntry:
        """
        Read one entry. The kernel must have zswap.

        :param address: ``struct zswap_entry *``
        :raises drgn.FaultError: if the entry cannot be read
        """
        data = self._near.read(address, self.entry_size)
        length = int.from_bytes(data[self._length : self._length + 4], self.memory.order)
        beyond, beyond_nid = [field.get(data) for field in self._split] or (0, NUMA_NO_NODE)
        if not 0 < beyond < length:
            beyond, beyond_nid = 0, NUMA_NO_NODE
        handle = self.memory.word_at(data, self._handle)
        objcg = self.memory.word_at(data, self._objcg) & ~MEMCG_DATA_FLAGS
        pool = self.memory.word_at(data, self._pool)
        found = ZswapEntry(address, length, handle, objcg, pool, beyond, beyond_nid)
        # An entry without data is on no list (up to 6.12). On a running kernel, lists change while
        # they are read.
        if self._lru is None or not length or self.image.is_moving:
            return found
        return found._replace(listed=self._is_linked(address + self._lru, data[self._lru :]))

    def _is_linked(self, head: int, data: bytes) -> bool:
        """
        Return whether a neighbour points back.

        Both need not: __list_add() and __list_del() change one after the other.

        :param head: ``struct list_head *`` of the entry
        :param data: its two pointers
        """
        memory = self.memory
        own = untagged(self.image, head)
        following, before = memory.words(data[: 2 * memory.word_size])
        for neighbour, back in ((following, memory.word_size), (before, 0)):
            with suppress(FaultError):
                there = untagged(self.image, self._near.word(neighbour + back))
                if untagged(self.image, neighbour) != own and there == own:
                    return True
        return False

    def addresses(self) -> Iterator[int]:
        """Iterate over the addresses of all entries, ``struct zswap_entry *``."""

        def missed(error: FaultError) -> None:
            self.coverage.miss("tree of zswap entries", error.address, str(error))

        try:
            trees = self.image.object("zswap_trees").read_()
        except UnknownKernelError:
            return
        for swap_type, tree in enumerate(trees):
            if not tree:
                continue
            try:
                number = self._number_of_trees(swap_type)
            except FaultError as error:
                missed(error)
                continue
            for i in range(number):
                try:
                    yield from self._in_tree(tree[i], missed)
                except FaultError as error:
                    missed(error)

    def _in_tree(self, tree: Object, on_fault: OnFault) -> Iterator[int]:
        """
        Iterate over the entries of a tree, ``struct zswap_entry *``.

        :param tree: ``struct xarray`` or ``struct zswap_tree``
        """
        if tree.type_.unaliased().type_name() == "struct xarray":
            yield from xa_entries(self.image, tree, on_fault)
            return
        root = tree.rbroot.address_of_()
        for entry in rbtree_entries(self.image, "struct zswap_entry", root, "rbnode", on_fault):
            yield entry.value_()

    def _number_of_trees(self, swap_type: int) -> int:
        """
        Return the number of trees of a swap device, ``zswap_swapon()``.

        :raises drgn.FaultError: if they are too many for its size
        """
        try:
            number = int(self.image.object("nr_zswap_trees")[swap_type])
        except UnknownKernelError:
            return 1  # up to 6.8
        device = self.image.object("swap_info")[swap_type].read_()
        if not device or number > -(-int(device.max) // ZSWAP_ADDRESS_SPACE_PAGES):
            raise FaultError(f"{number} trees of zswap entries", device.value_())
        return number

    def nodes(self, entry: ZswapEntry) -> dict[int, int]:
        """
        Return the bytes of the data of an entry, by the node of the page they are on.

        :return: all bytes are on ``NUMA_NO_NODE`` if the data was not found
        """
        if not entry.length:
            return {}
        parts = self.parts(entry)
        if parts is None:
            return {NUMA_NO_NODE: entry.length}
        nodes: dict[int, int] = {}
        for part in parts:
            nodes[part.nid] = nodes.get(part.nid, 0) + part.length
        return nodes

    def parts(self, entry: ZswapEntry) -> list[ZswapPart] | None:
        """
        Return the location of the data of an entry.

        :return: ``None`` if it was not found, which :attr:`placement` counts
        """
        try:
            parts = self._locate(entry)
            self.placement.read += 1
            return parts
        except (FaultError, UnknownKernelError, ValueError) as error:
            self.placement.miss("data of a zswap entry", entry.address, str(error))
            return None

    def _locate(self, entry: ZswapEntry) -> list[ZswapPart]:
        """
        Return the location of the data of an entry.

        :raises drgn.FaultError: if a structure of its allocator cannot be read
        :raises UnknownKernelError: if the types of its allocator are missing
        :raises ValueError: if the handle is not that of an object
        """
        kind, header = self._zpools.allocator(entry.pool)
        if kind == "zsmalloc":
            if self._zsmalloc is None:
                self._zsmalloc = ZsmallocObjects(self.image)
            return self._zsmalloc.parts(entry.handle, header, entry.length)
        if kind not in ("zbud", "z3fold"):
            raise ValueError(f"the allocator {kind} is not known")
        find = self._zpools.zbud if kind == "zbud" else self._zpools.z3fold
        part = find(entry.handle, header + entry.length)
        return [part._replace(offset=part.offset + header, length=entry.length)]

    def owner(self, page: int, offset: int) -> ZswapEntry | None:
        """
        Find the entry whose data includes a byte of a page.

        All entries are read: nothing refers from the data to its entry.

        :param page: ``struct page *``
        :param offset: offset in the page, in bytes
        :return: ``None`` if there is none
        """
        for entry in self.entries():
            for part in self.parts(entry) or () if entry.length else ():
                if part.page == page and part.offset <= offset < part.offset + part.length:
                    return entry
        return None


def zswap_entry_cache(image: Image) -> int:
    """
    Return the slab cache of the entries, ``struct kmem_cache *``; 0 without zswap.

    It may be shared with other structures of the same size.

    :raises drgn.FaultError: if the pointer to it cannot be read
    """
    try:
        cache: int = image.object("zswap_entry_cache").value_()
    except UnknownKernelError:
        return 0
    return cache


def zswap_cursors(image: Image) -> list[int]:
    """
    Return the memcgs whose entries zswap writes back next. Each cursor holds a reference.

    ``shrink_worker()`` leaves a cursor where it ends. ``zswap_memcg_offline_cleanup()`` moves it
    away from a memcg that is removed.

    :return: ``struct mem_cgroup *``
    :raises drgn.FaultError: if a cursor cannot be read
    """
    try:
        return [image.object("zswap_next_shrink").value_()]
    except UnknownKernelError:
        pass
    # Each pool has a cursor in 6.8. Before, there was none.
    if not has_member(image, "struct zswap_pool", "next_shrink"):
        return []
    faults: list[FaultError] = []
    head = image.object("zswap_pools").address_of_()
    pools = list_entries(image, "struct zswap_pool", head, "list", faults.append)
    found = [pool.next_shrink.value_() for pool in pools]
    if faults:
        raise faults[0]
    return found
