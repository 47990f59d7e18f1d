# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Ring buffers of perf
--------------------

Mirrors ``struct perf_buffer`` of :linux:`kernel/events/ring_buffer.c`. An event, and so its buffer,
belongs to a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.model import Coverage

__all__ = ("FILE_OPERATIONS", "perf_pages")

#: Name of the operations of files whose ``private_data`` is a ``struct perf_event *``.
FILE_OPERATIONS = "perf_fops"
#: More pages than a buffer has: their addresses are in one block of pages (rb_alloc()).
_MOST_PAGES = 1 << 20


def perf_pages(image: Image, events: Iterable[int], coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages of ring buffers that user space reads.

    :param events: ``struct perf_event *`` of all files of perf
    :param coverage: counts what is unreadable
    :return: the address of each page. One that is in no direct map is of a vmalloc area
        (``CONFIG_PERF_USE_VMALLOC``).
    """
    if not has_type(image, "struct perf_buffer"):
        return
    seen: set[int] = set()
    for address in events:
        try:
            buffer = image.pointer("struct perf_event *", address).rb.read_()
            if not buffer or buffer.value_() in seen:
                continue  # events can share a buffer (PERF_EVENT_IOC_SET_OUTPUT)
            seen.add(buffer.value_())
            yield from _of_buffer(image, buffer)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("ring buffer of perf", error.address, str(error))


def _of_buffer(image: Image, buffer: Object) -> Iterator[int]:
    """
    Return the pages of a ``struct perf_buffer *``.

    :raises drgn.FaultError: if they cannot be read
    """
    yield buffer.user_page.value_()
    size = image.memory.word_size
    parts = [(buffer.data_pages.address_of_().value_(), int(buffer.nr_pages))]
    if buffer.aux_pages:
        parts.append((buffer.aux_pages.value_(), int(buffer.aux_nr_pages)))
    for start, count in parts:
        if not 0 <= count <= _MOST_PAGES:
            raise FaultError(f"a buffer of {count} pages", buffer.value_())
        yield from image.memory.words(image.memory.read(start, count * size))
