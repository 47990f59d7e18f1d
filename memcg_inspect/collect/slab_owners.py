# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Owners of pages that are in slabs
---------------------------------

Sockets and files refer to pages that nothing marks.
:mod:`memcg_inspect.collect.unmarked_owners` finds these pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.fs import pipe
from memcg_inspect.linux.fs.file_table import FileReader
from memcg_inspect.linux.kernel.events import ring_buffer as perf
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.linux.net.sock import SockReader, socket_caches
from memcg_inspect.model import Coverage

__all__ = ("SlabOwnerReader", "SlabOwners")


@dataclass
class SlabOwners:
    """
    Owners of pages. It can be pickled.

    :ivar socks: ``struct sock *``
    :ivar files: ``private_data`` of files, by the name of their operations
    """

    socks: set[int] = field(default_factory=set)
    files: dict[str, set[int]] = field(default_factory=dict)

    def merge(self, other: SlabOwners) -> None:
        """Add those of other slabs."""
        self.socks |= other.socks
        for operations, data in other.files.items():
            self.files.setdefault(operations, set()).update(data)


class SlabOwnerReader:
    """
    Finder of such owners in slabs.

    :param memcgs: ``struct mem_cgroup *`` of all memcgs
    :param coverage: counts the protocols of sockets that cannot be read
    """

    def __init__(
        self, image: Image, slabs: SlabReader, memcgs: Container[int], coverage: Coverage
    ) -> None:
        self._memcgs = memcgs
        self._socks = SockReader(image, slabs, socket_caches(image, coverage))
        self._files = FileReader(image, slabs, *pipe.FILE_OPERATIONS, perf.FILE_OPERATIONS)

    def add(self, slab: Slab, found: SlabOwners, coverage: defaultdict[str, Coverage]) -> None:
        """
        Add the sockets and files in a slab.

        :param coverage: counts what is unreadable
        """
        self._socks.coverage = coverage["sock"]
        # Those without a cache of their own are told from other objects by their memcg.
        found.socks.update(sock.address for sock in self._socks.read(slab, self._memcgs))
        found.socks.update(self._socks.in_use(slab))
        try:
            for file in self._files.read(slab):
                if file.is_open:
                    found.files.setdefault(file.operations, set()).add(file.data)
        except FaultError as error:
            coverage["files"].miss("slab of files", error.address, str(error))
