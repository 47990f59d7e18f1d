# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages of socket buffers
-----------------------

Mirrors ``struct sk_buff`` and ``struct skb_shared_info`` of :linux:`net/core/skbuff.c`.
For AF_UNIX sockets (:linux:`net/unix/af_unix.c`), ``alloc_skb_with_frags()`` allocates charged
compound pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object
from drgn.helpers.linux.list import hlist_for_each_entry
from drgn.helpers.linux.net import for_each_net

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member, has_type
from memcg_inspect.model import Coverage

__all__ = ("unix_socket_pages",)


def unix_socket_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages in the receive queues of all AF_UNIX sockets.

    :param coverage: counts the hash buckets that are unreadable
    :return: ``struct page *`` of the first page of each fragment
    :raises drgn.FaultError: if the list of network namespaces cannot be read
    """
    if not has_type(image, "struct unix_sock"):
        return
    for net in for_each_net(image.prog):
        if not has_member(image, "struct net", "unx"):
            return
        table = net.unx.table
        for i in range(int(table.mask) + 1 if table.type_.has_member("mask") else 256):
            try:
                for sock in hlist_for_each_entry(
                    "struct sock", table.buckets[i].address_of_(), "__sk_common.skc_node"
                ):
                    yield from _queue(image, sock.sk_receive_queue)
            except FaultError as error:
                coverage.miss("AF_UNIX sockets", error.address, str(error))


def _queue(image: Image, queue: Object) -> Iterator[int]:
    """Return the pages of a ``struct sk_buff_head``."""
    skb, end = queue.next.read_(), queue.address_
    while skb.value_() != end:
        yield from _skb(image, skb)
        skb = skb.next.read_()


def _skb(image: Image, skb: Object) -> Iterator[int]:
    """Return the pages of the fragments of a ``struct sk_buff *``."""
    # skb_end_pointer(): skb->end is an offset on 64-bit machines
    # (CONFIG_NET_SKBUFF_DATA_USES_OFFSET), and a pointer on others.
    end = skb.end.value_()
    address = end if end >> 32 else skb.head.value_() + end
    shared = Object(image.prog, "struct skb_shared_info", address=address)
    for i in range(int(shared.nr_frags)):
        frag = shared.frags[i]
        # skb_frag_t is a struct bio_vec up to 6.8, and has a netmem_ref since. Bit 0 of that is
        # set if it is not a page (NET_IOV).
        member = "netmem" if frag.type_.has_member("netmem") else "bv_page"
        page = int(frag.member_(member).value_())
        if not page & 1:
            yield page
    fragment = shared.frag_list.read_()
    while fragment:
        yield from _skb(image, fragment)
        fragment = fragment.next.read_()
