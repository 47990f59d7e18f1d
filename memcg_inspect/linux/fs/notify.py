# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Groups of inotify and fanotify
------------------------------

Mirrors :linux:`fs/notify/group.c`. A group holds a reference to the memcg of the task that made
it, which pays for its events. Groups are in no list. They are found in the slabs of the
``kmalloc()`` caches that can contain them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from drgn import FaultError, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.model import Coverage

__all__ = ("Group", "GroupReader")

#: Operations of groups that have a memcg.
_OPERATIONS = ("inotify_fsnotify_ops", "fanotify_fsnotify_ops")


class Group(NamedTuple):
    """
    One ``struct fsnotify_group``.

    :ivar address: ``struct fsnotify_group *``
    :ivar memcg: ``struct mem_cgroup *``
    """

    address: int
    memcg: int


class GroupReader:
    """
    Reader of the groups of inotify and fanotify in slabs.

    :ivar coverage: counts the groups that were read, and slabs that are unreadable
    """

    def __init__(self, image: Image, slabs: SlabReader) -> None:
        self.coverage = Coverage()
        self._memory = image.memory
        self._slabs = slabs
        self._operations = _operations(image)
        if not self._operations:
            return
        group = image.type("struct fsnotify_group")
        self._size = sizeof(group)
        self._ops = offsetof(group, "ops")
        self._refs = offsetof(group, "refcnt")
        self._memcg = offsetof(group, "memcg")

    def read(self, slab: Slab, memcgs: Container[int]) -> Iterator[Group]:
        """
        Return the groups in a slab that refer to a memcg.

        :param memcgs: ``struct mem_cgroup *`` of all memcgs
        """
        if not slab.objects or not self.may_read(slab.cache):
            return
        try:
            for address in self._candidates(slab):
                data = self._memory.read(address, self._size)
                memcg = self._memory.word_at(data, self._memcg)
                # fsnotify_put_group() leaves 0 in a group that it frees.
                if memcg in memcgs and any(data[self._refs : self._refs + 4]):
                    self.coverage.read += 1
                    yield Group(address, memcg)
        except FaultError as error:
            if not self._slabs.has_freed(slab):
                self.coverage.miss("slab that may have groups", error.address, str(error))

    def may_read(self, cache: SlabCache) -> bool:
        """Return whether slabs of a cache may have groups."""
        # The smallest cache that is large enough. The sizes are powers of 2, but for 96 and 192.
        # A name that could not be read may be that of such a cache.
        return (
            bool(self._operations)
            and cache.name.startswith(("kmalloc", "kmem_cache 0x"))
            and self._size <= cache.object_size < 2 * self._size
        )

    def _candidates(self, slab: Slab) -> Iterator[int]:
        first, stride = self._slabs.address(slab, 0), slab.cache.size
        data = self._memory.read(first, (slab.objects - 1) * stride + self._size)
        for number, ops in enumerate(self._memory.words(data, self._ops, stride)):
            if ops in self._operations:
                yield first + number * stride


def _operations(image: Image) -> frozenset[int]:
    """Return the ``struct fsnotify_ops *`` of groups that have a memcg."""
    if not has_member(image, "struct fsnotify_group", "memcg"):
        return frozenset()
    found = set()
    for name in _OPERATIONS:
        try:
            found.add(image.symbol(name).address)
        except UnknownKernelError:
            continue
    return frozenset(found)
