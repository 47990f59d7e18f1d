# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Charged compound pages that are no large kmallocs
-------------------------------------------------

Kernels without ``PGTY_large_kmalloc`` do not mark the pages of a large kmalloc, so they are
told by exclusion: other users of charged compound pages are asked for theirs. They are the
rings of :linux:`io_uring/io_uring.c` and the data of AF_UNIX sockets
(:linux:`net/core/skbuff.c`, ``alloc_skb_with_frags()``).
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, Program, cast
from drgn.helpers.linux.fs import for_each_file
from drgn.helpers.linux.list import hlist_for_each_entry
from drgn.helpers.linux.net import for_each_net

from memcg_inspect.image.layout import has_member, has_type
from memcg_inspect.linux.kernel.sched import find_tasks
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage

__all__ = ("other_compound_pages",)


def other_compound_pages(prog: Program, coverage: Coverage) -> set[int]:
    """Return the ``struct page *`` of the known ones."""
    pages: set[int] = set()
    for find in (_io_uring, _unix_sockets):
        try:
            for page in find(prog, coverage):
                coverage.read += 1
                pages.add(page)
        except FaultError as error:
            coverage.miss("owners of compound pages", error.address, str(error))
    return pages


def _io_uring(prog: Program, coverage: Coverage) -> Iterator[int]:
    if not has_type(prog, "struct io_ring_ctx"):
        return
    try:
        operations = prog.symbol("io_uring_fops").address
    except LookupError:
        return
    frames, seen = mem_map(prog), set()

    def missed(error: FaultError) -> None:
        coverage.miss("files of a task", error.address, str(error))

    for task in find_tasks(prog, missed):
        try:
            files = task.files.value_()
            if not files or files in seen:
                continue
            seen.add(files)
            for _, file in for_each_file(task):
                # Between get_unused_fd_flags() and fd_install() there is a number, and no file.
                if not file or file.f_op.value_() != operations:
                    continue
                context = cast("struct io_ring_ctx *", file.private_data)
                for area in (context.rings, context.sq_sqes):
                    if area:
                        yield frames.virt_to_page(area.value_())
        except FaultError as error:
            missed(error)


def _unix_sockets(prog: Program, coverage: Coverage) -> Iterator[int]:
    if not has_type(prog, "struct unix_sock"):
        return
    for net in for_each_net(prog):
        if not has_member(prog, "struct net", "unx"):
            return
        table = net.unx.table
        for i in range(int(table.mask) + 1 if table.type_.has_member("mask") else 256):
            try:
                for sock in hlist_for_each_entry(
                    "struct sock", table.buckets[i].address_of_(), "__sk_common.skc_node"
                ):
                    yield from _queue(sock.sk_receive_queue)
            except FaultError as error:
                coverage.miss("AF_UNIX sockets", error.address, str(error))


def _queue(queue: Object) -> Iterator[int]:
    skb, end = queue.next.read_(), queue.address_
    while skb.value_() != end:
        yield from _skb(skb)
        skb = skb.next.read_()


def _skb(skb: Object) -> Iterator[int]:
    prog = skb.prog_
    # An offset with CONFIG_NET_SKBUFF_DATA_USES_OFFSET, as on all 64-bit machines.
    end = skb.end.value_()
    address = end if end >> 32 else skb.head.value_() + end
    shared = Object(prog, "struct skb_shared_info", address=address)
    for i in range(int(shared.nr_frags)):
        frag = shared.frags[i]
        # A bio_vec until 6.8, then a netmem, whose lowest bit marks what is no page.
        member = "netmem" if frag.type_.has_member("netmem") else "bv_page"
        page = int(frag.member_(member).value_())
        if not page & 1:
            yield page
    fragment = shared.frag_list.read_()
    while fragment:
        yield from _skb(fragment)
        fragment = fragment.next.read_()
