# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Ring buffers of ftrace
----------------------

Mirrors ``struct trace_buffer`` of :linux:`kernel/trace/ring_buffer.c`. Each CPU has a ring of
pages, one page that is being read, and at times a page for the next reader. Trace instances are
found through ``ftrace_trace_arrays`` of :linux:`kernel/trace/trace.c`.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, TypeKind, offsetof, sizeof
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import OnFault, list_entries
from memcg_inspect.linux.mm.mmzone import possible_cpus
from memcg_inspect.model import Coverage

__all__ = ("ring_buffer_pages",)

#: ``RB_FLAG_MASK``: bits of a link that say what the page after it is for.
_FLAGS = 3
#: Members of ``struct trace_array``. The second one was named ``max_buffer``, and is there only if
#: the kernel can take snapshots.
_BUFFERS = ("array_buffer", "max_buffer", "snapshot_buffer")


def ring_buffer_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages of all ring buffers.

    :param coverage: counts the rings that were read, and those that are unreadable
    :return: address of the first byte of each page, or block of pages
    """
    if not has_type(image, "struct ring_buffer_per_cpu"):
        return  # CONFIG_RING_BUFFER=n
    cpus, rings = possible_cpus(image), _Rings(image)

    def missed(error: FaultError) -> None:
        coverage.miss("ring buffer of ftrace", error.address, str(error))

    for buffer in _buffers(image, missed):
        for cpu in cpus:
            try:
                ring = buffer.buffers[cpu].read_()
                if ring:
                    yield from rings.pages(ring)
                    coverage.read += 1
            except FaultError as error:
                missed(error)
    try:
        # Only while an event has a filter.
        buffered = image.object("trace_buffered_event")
        for cpu in cpus:
            page = per_cpu(buffered, cpu).value_()
            if page:
                yield page
    except UnknownKernelError:
        return
    except FaultError as error:
        missed(error)


def _buffers(image: Image, missed: OnFault) -> Iterator[Object]:
    """Iterate over all ``struct trace_buffer *``."""
    try:
        arrays = image.object("ftrace_trace_arrays").address_of_()
        found = [image.object("temp_buffer").read_()]
    except UnknownKernelError:
        return
    except FaultError as error:
        missed(error)
        return
    for array in list_entries(image, "struct trace_array", arrays, "list", missed):
        for name in _BUFFERS:
            if array.type_.type.has_member(name):
                try:
                    found.append(array.member_(name).buffer.read_())
                except FaultError as error:
                    missed(error)
    seen: set[int] = set()
    for buffer in found:
        if buffer and buffer.value_() not in seen:
            seen.add(buffer.value_())
            yield buffer


class _Rings:
    """Reader of ``struct ring_buffer_per_cpu``."""

    def __init__(self, image: Image) -> None:
        page = image.type("struct buffer_page")
        self._memory, self._size = image.memory, sizeof(page)
        self._list, self._page = offsetof(page, "list"), offsetof(page, "page")

    def pages(self, ring: Object) -> Iterator[int]:
        """
        Return the pages of a ``struct ring_buffer_per_cpu *``.

        :raises drgn.FaultError: if they cannot be read, or the ring has more pages than it says
        """
        reader = ring.reader_page.value_()
        if reader:
            yield from self._read(reader)[1]
        # A struct buffer_data_read_page, which also has an order, since v6.8.
        free = ring.free_page
        data = free.data.value_() if free.type_.kind == TypeKind.STRUCT else free.value_()
        if data:
            yield data
        # Of a buffer that user space has mapped (since 6.10).
        if ring.type_.type.has_member("meta_page") and ring.meta_page:
            yield ring.meta_page.value_()
        # rb_insert_pages() adds pages before they are counted.
        most = int(ring.nr_pages) + max(int(ring.nr_pages_to_update), 0)
        # The list has no head.
        link, seen = ring.pages.value_(), set[int]()
        while link and link not in seen:
            if len(seen) == most:
                raise FaultError("a ring buffer has more pages than it says", link)
            seen.add(link)
            link, pages = self._read(link - self._list)
            yield from pages

    def _read(self, address: int) -> tuple[int, list[int]]:
        """Return the link of a ``struct buffer_page *``, and its page, if it has one."""
        data = self._memory.read(address, self._size)
        page = self._memory.word_at(data, self._page)
        return self._memory.word_at(data, self._list) & ~_FLAGS, [page] if page else []
