# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pipes
-----

Mirrors ``struct pipe_inode_info`` of :linux:`fs/pipe.c`. ``splice()`` moves pages into a pipe from
their former owner, e.g. from the queue of a socket (``skb_splice_bits()``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drgn import FaultError, Object
from drgn.helpers.linux.mm import compound_head

from memcg_inspect.image.image import Image
from memcg_inspect.model import Coverage

__all__ = ("FILE_OPERATIONS", "pipe_pages", "spare_pages")

#: Names of the operations of files whose ``private_data`` is a ``struct pipe_inode_info *``. Files
#: of pipes without a name have their own since v6.15.
FILE_OPERATIONS = ("pipefifo_fops", "pipeanon_fops")


def pipe_pages(image: Image, pipes: Iterable[int], coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages in pipes.

    :param pipes: ``struct pipe_inode_info *``. One that was freed is left out, if it shows.
    :param coverage: counts what is unreadable
    :return: ``struct page *`` of the head of each page
    """
    for address in pipes:
        pipe = image.pointer("struct pipe_inode_info *", address)
        try:
            size, used = int(pipe.ring_size), int(pipe.head) - int(pipe.tail)
            # pipe_full(): a ring is a power of 2.
            if not pipe.files or size & (size - 1) or not 0 < used % (1 << 32) <= size:
                continue
            for i in range(int(pipe.tail), int(pipe.tail) + used % (1 << 32)):
                page = pipe.bufs[i & (size - 1)].page.read_()
                if page:
                    yield compound_head(page).value_()
        except FaultError as error:
            coverage.miss("pipe", error.address, str(error))


def spare_pages(image: Image, pipes: Iterable[int], coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages that pipes keep for the next write.

    :param pipes: ``struct pipe_inode_info *``
    :param coverage: counts what is unreadable
    :return: ``struct page *``
    """
    for address in pipes:
        pipe = image.pointer("struct pipe_inode_info *", address)
        try:
            yield from filter(None, _spare(pipe))
        except FaultError as error:
            coverage.miss("pipe", error.address, str(error))


def _spare(pipe: Object) -> list[int]:
    members = pipe.type_.type
    if not pipe.files:
        return []
    if members.has_member("prealloc"):  # since 7.3
        pages = pipe.prealloc.pages.value_()
        return list(pages[: int(pipe.prealloc.count)])
    # An array of two since v6.15.
    found = pipe.tmp_page.value_()
    return found if isinstance(found, list) else [found]
