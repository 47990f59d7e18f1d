# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rings of io_uring
-----------------

Mirrors ``struct io_ring_ctx`` of :linux:`io_uring/io_uring.c`, and ``struct io_buffer_list`` of
:linux:`io_uring/kbuf.c`. ``io_pages_map()`` allocates a ring as a charged compound page if it can.

An instance belongs to its file. Any holder of the file keeps it: a descriptor, a mapping, or
``registered_rings`` of a task (``IORING_REGISTER_RING_FDS``). When the file is released, the
instance is left to a work item, which waits for its requests and tasks (``io_ring_exit_work()``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drgn import FaultError, Object, container_of

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.workqueue import works_of
from memcg_inspect.linux.lib.list import OnFault, hlist_entries
from memcg_inspect.linux.lib.xarray import xa_entries
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage

__all__ = ("FILE_OPERATIONS", "io_uring_pages")

#: Name of the operations of files whose ``private_data`` is a ``struct io_ring_ctx *``.
FILE_OPERATIONS = "io_uring_fops"

#: Members of ``struct io_ring_ctx``: a ring, and the array of its pages, since 6.5.
_RINGS = (("rings", "ring_pages"), ("sq_sqes", "sqe_pages"))
#: Members that are ``struct io_mapped_region``, since 6.14.
_REGIONS = ("ring_region", "sq_region", "param_region")
#: ``BGID_ARRAY``: groups of provided buffers in ``io_ring_ctx.io_bl``.
_GROUPS = 64


def io_uring_pages(image: Image, of_files: Iterable[int], coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages of all rings.

    :param of_files: ``struct io_ring_ctx *`` of all files of io_uring
    :param coverage: counts what is unreadable
    :return: ``struct page *`` of the first page of each ring
    """
    if not has_type(image, "struct io_ring_ctx"):
        return

    def missed(error: FaultError) -> None:
        coverage.miss("rings of io_uring", error.address, str(error))

    contexts = [image.pointer("struct io_ring_ctx *", ctx) for ctx in of_files]
    for ctx in (*contexts, *_exiting(image, missed)):
        try:
            yield from _rings(image, ctx)
            yield from _buffer_rings(image, ctx)
            yield from _unused_buffer_rings(image, ctx, missed)
        except FaultError as error:
            missed(error)


def _exiting(image: Image, missed: OnFault) -> Iterator[Object]:
    """Iterate over the instances whose file was released, ``struct io_ring_ctx *``."""
    try:
        function = image.symbol("io_ring_exit_work").address
    except UnknownKernelError:
        return
    for work in works_of(image, function, missed):
        yield container_of(work, "struct io_ring_ctx", "exit_work")


def _rings(image: Image, ctx: Object) -> Iterator[int]:
    members = ctx.type_.type
    for ring, pages in _RINGS:
        # Rings of several pages that are not contiguous are in vmalloc memory. Their pages are not
        # compound. Up to 6.9 only rings that the user allocated (IORING_SETUP_NO_MMAP) have an
        # array; others are in the direct map.
        array = ctx.member_(pages).read_() if members.has_member(pages) else None
        if array:
            yield from _first(array)
        elif ctx.member_(ring) and not members.has_member(_REGIONS[0]):
            yield mem_map(image).virt_to_page(ctx.member_(ring).value_())
    for region in _REGIONS:
        if members.has_member(region):
            yield from _first(ctx.member_(region).pages.read_())


def _buffer_rings(image: Image, ctx: Object) -> Iterator[int]:
    """
    Return the rings of provided buffers that the kernel allocated (``IOU_PBUF_RING_MMAP``, 6.4).

    Pages of user space are among them (``io_pin_pbuf_ring()``).
    """
    lists = [
        image.pointer("struct io_buffer_list *", entry)
        for entry in xa_entries(image, ctx.io_bl_xa.address_of_())
    ]
    if ctx.type_.type.has_member("io_bl") and ctx.io_bl:  # until 6.8
        lists += [ctx.io_bl + group for group in range(_GROUPS)]
    for buffers in lists:
        members = buffers.type_.type
        if members.has_member("region"):
            yield from _first(buffers.region.pages.read_())
        elif buffers.buf_nr_pages:  # otherwise buf_pages is a list
            yield from _first(buffers.buf_pages.read_())
        elif members.has_member("is_mmap") and buffers.is_mmap:  # 6.4 to 6.9
            yield mem_map(image).virt_to_page(buffers.buf_ring.value_())


def _unused_buffer_rings(image: Image, ctx: Object, missed: OnFault) -> Iterator[int]:
    """Return the rings of provided buffers that are kept for others of their size (6.6 to 6.9)."""
    if not ctx.type_.type.has_member("io_buf_list"):
        return
    head = ctx.io_buf_list.address_of_()
    for ring in hlist_entries(image, "struct io_buf_free", head, "list", missed):
        yield mem_map(image).virt_to_page(ring.mem.value_())


def _first(pages: Object) -> Iterator[int]:
    """Return the first element of an array, ``struct page **``, which may be ``NULL``."""
    if pages and pages[0]:
        yield pages[0].value_()
