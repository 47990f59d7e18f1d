# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Open files
----------

Mirrors ``struct file`` and ``alloc_empty_file()`` of :linux:`fs/file_table.c`.

Files are found in the slabs of their cache, not through file descriptors. A mapping, a message on
its way, or a system call can be the last holder of a file that has no descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from drgn import FaultError, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader

__all__ = ("FileReader", "OpenFile")


#: Name of the cache of files.
_NAME = "filp"


class OpenFile(NamedTuple):
    """
    One open file.

    :ivar operations: name of its ``struct file_operations``
    :ivar data: ``private_data``, a pointer
    :ivar is_open: whether it has references. Otherwise it is being closed, or was closed.
    """

    operations: str
    data: int
    is_open: bool


class FileReader:
    """
    Reader of the files in slabs.

    :param operations: names of the ``struct file_operations`` of the files to find. Those that the
        kernel does not have are left out.
    """

    def __init__(self, image: Image, slabs: SlabReader, *operations: str) -> None:
        self._memory = image.memory
        self._slabs = slabs
        self._names = _addresses(image, operations)
        file = image.type("struct file")
        self._f_op, self._data = offsetof(file, "f_op"), offsetof(file, "private_data")
        # A file_ref_t since commit 90ee6ed776c0 ("fs: port files to file_ref") (in v6.13): one less
        # than the number of references.
        count = "f_count" if file.has_member("f_count") else "f_ref.refcnt"
        self._least = 1 if file.has_member("f_count") else 0
        self._count = offsetof(file, count)
        self._cache = self._cachep(image)

    def _cachep(self, image: Image) -> int:
        try:
            return self._memory.word(image.symbol("filp_cachep").address)
        except (UnknownKernelError, FaultError):
            return 0

    @property
    def can_read(self) -> bool:
        """Whether the cache of files is known."""
        return bool(self._cache)

    def read(self, slab: Slab) -> Iterator[OpenFile]:
        """
        Return the wanted files in a slab that have ``private_data``.

        All slots of the slab are read, free ones included.

        :raises drgn.FaultError: if the slab cannot be read
        """
        if not self.may_read(slab.cache):
            return
        for address in self._slabs.objects(slab):
            name = self._names.get(self._memory.word(address + self._f_op))
            if name is not None:
                data = self._memory.word(address + self._data)
                if data:
                    yield OpenFile(name, data, self._references(address) >= self._least)

    def may_read(self, cache: SlabCache) -> bool:
        """Return whether slabs of a cache have files."""
        # A pointer that the kernel patches into its code (runtime_const_ptr()) may be in no
        # variable. The cache is never merged, since its objects are SLAB_TYPESAFE_BY_RCU.
        return cache.address == self._cache if self._cache else cache.name == _NAME

    def _references(self, address: int) -> int:
        data = self._memory.read(address + self._count, self._memory.word_size)
        return int.from_bytes(data, self._memory.order, signed=True)


def _addresses(image: Image, names: tuple[str, ...]) -> Mapping[int, str]:
    found = {}
    for name in names:
        try:
            found[image.symbol(name).address] = name
        except UnknownKernelError:
            continue
    return found
