# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Socket buffers
--------------

Mirrors ``struct sk_buff`` and ``struct skb_shared_info`` of :linux:`net/core/skbuff.c`.
For AF_UNIX sockets (:linux:`net/unix/af_unix.c`), ``alloc_skb_with_frags()`` allocates charged
compound pages.

:class:`SkbReader` finds the bytes that a socket counts and that are not charged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drgn import FaultError, Object, cast, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, bit_field, constant, has_member, has_type
from memcg_inspect.linux.arch.processor import cache_line, untagged
from memcg_inspect.linux.lib.list import (
    hlist_entries,
    list_entries,
    raise_fault,
    rbtree_entries,
)
from memcg_inspect.model import Coverage

__all__ = ("SkbReader", "fragments", "socket_fragments", "unix_socket_pages")

#: ``UNIX_HASH_SIZE``: sockets with an abstract name are in the second half.
_UNIX_HASH_SIZE = 512
#: ``PACKET_OUTGOING`` (:linux:`include/uapi/linux/if_packet.h`)
_PACKET_OUTGOING = 4


def unix_socket_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages in the receive queues of all AF_UNIX sockets.

    :param coverage: counts what is unreadable: network namespaces, hash buckets, queues
    :return: ``struct page *`` of the first page of each fragment
    """
    if not has_type(image, "struct unix_sock") or not has_member(image, "struct net", "unx"):
        return

    def missed(error: FaultError) -> None:
        coverage.miss("AF_UNIX sockets", error.address, str(error))

    nets = image.object("net_namespace_list").address_of_()
    for net in list_entries(image, "struct net", nets, "list", missed):
        try:
            buckets = net.unx.table.buckets.read_()
        except FaultError as error:
            missed(error)
            continue
        for head in (buckets[i].address_of_() for i in range(_UNIX_HASH_SIZE)):
            for sock in hlist_entries(image, "struct sock", head, "__sk_common.skc_node", missed):
                try:
                    yield from _queue(image, sock.sk_receive_queue)
                except FaultError as error:
                    missed(error)


def socket_fragments(image: Image, socks: Iterable[int], coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages in the queues of sockets, and over those that sockets fill now.

    :param socks: ``struct sock *``
    :param coverage: counts the sockets that were read, and those whose queue is unreadable
    :return: ``struct page *`` of each fragment
    """
    for address in socks:
        sock = image.pointer("struct sock *", address)
        try:
            yield from fragments(sock.sk_frag)
            for name in ("sk_receive_queue", "sk_write_queue", "sk_error_queue"):
                yield from _queue(image, sock.member_(name))
            # tcp_rtx_queue, in a union with sk_send_head
            root = sock.tcp_rtx_queue.address_of_()
            for skb in rbtree_entries(image, "struct sk_buff", root, "rbnode", raise_fault):
                yield from _pages(_shared_info(image, skb))
            coverage.read += 1
        except FaultError as error:
            coverage.miss("queue of a socket", address, str(error))


def fragments(frag: Object) -> Iterator[int]:
    """
    Yield the page that a task or a socket takes its next fragments from, if it has one.

    :param frag: ``struct page_frag``
    :return: ``struct page *``
    :raises drgn.FaultError: if it cannot be read
    """
    page = frag.page.value_()
    if page:
        yield page


def _queue(image: Image, queue: Object) -> Iterator[int]:
    """
    Return the pages of a ``struct sk_buff_head``.

    :raises drgn.FaultError: if it cannot be read, or has a buffer twice
    """
    ends, seen = (0, untagged(image, queue.address_ or 0)), set[int]()
    todo = [queue.next.read_()]
    while todo:
        skb = todo.pop()
        if untagged(image, skb.value_()) in ends:
            continue
        if skb.value_() in seen:
            raise FaultError("the queue has a buffer twice", skb.value_())
        seen.add(skb.value_())
        shared = _shared_info(image, skb)
        yield from _pages(shared)
        # A buffer of frag_list may have such a list itself.
        todo += [skb.next.read_(), shared.frag_list.read_()]


def _shared_info(image: Image, skb: Object) -> Object:
    """Return the ``struct skb_shared_info`` of a ``struct sk_buff *``."""
    # skb_end_pointer(): skb->end is an offset on 64-bit machines
    # (CONFIG_NET_SKBUFF_DATA_USES_OFFSET), and a pointer on others.
    end = skb.end.value_()
    # What drgn adds to a pointer wraps around like a pointer, also if it is damaged.
    place = Object(image.prog, "void *", end) if end >> 32 else skb.head + end
    return cast("struct skb_shared_info *", place)[0]


def _pages(shared: Object) -> Iterator[int]:
    """Return the pages of the fragments of a ``struct skb_shared_info``."""
    count = int(shared.nr_frags)
    if count > array_length(shared.frags.type_):  # MAX_SKB_FRAGS
        raise FaultError(f"{count} fragments of a socket buffer", shared.address_ or 0)
    for i in range(count):
        frag = shared.frags[i]
        # skb_frag_t is a struct bio_vec up to 6.8, and has a netmem_ref since. Bit 0 of that is
        # set if it is not a page (NET_IOV).
        member = "netmem" if frag.type_.has_member("netmem") else "bv_page"
        page = int(frag.member_(member).value_())
        if not page & 1:
            yield page


class SkbReader:
    """
    Reader of the queues of a socket whose bytes are counted and not charged.

    All its methods raise :class:`drgn.FaultError` if a queue cannot be read, or if it cannot be
    one: if it does not lead back to its head, or has more bytes than its socket counts.
    """

    def __init__(self, image: Image) -> None:
        self._image, self._memory = image, image.memory
        skb, shared = image.type("struct sk_buff"), image.type("struct skb_shared_info")
        self._next = offsetof(skb, "next")
        self._rbnode = offsetof(skb, "rbnode")
        self._sk = offsetof(skb, "sk")
        self._head = offsetof(skb, "head")
        self._truesize = bit_field(image, "struct sk_buff", "truesize")
        self._end = bit_field(image, "struct sk_buff", "end")
        self._pkt_type = bit_field(image, "struct sk_buff", "pkt_type")
        self._flags = bit_field(image, "struct skb_shared_info", "flags")
        # Kernels before 5.16 charge all buffers of MSG_ZEROCOPY.
        self._pure_zerocopy = constant(image, "SKBFL_PURE_ZEROCOPY") or 0
        node = image.type("struct rb_node")
        self._children = [offsetof(node, "rb_left"), offsetof(node, "rb_right")]
        self._skb_size, self._shared_size = sizeof(skb), sizeof(shared)
        line = cache_line(image.prog)
        # SKB_TRUESIZE(0)
        self._overhead = sum(-(-size // line) * line for size in (sizeof(skb), sizeof(shared)))

    def in_error_queue(self, sock: int, head: int, counted: int) -> int:
        """
        Return the bytes of ``sk_rmem_alloc`` in an error queue.

        ``sock_queue_err_skb()`` adds them to the counter and charges nothing. It marks its
        buffers with ``PACKET_OUTGOING``. Notifications of ``MSG_ZEROCOPY``, which are in the same
        queue, are in ``sk_omem_alloc``.

        :param sock: ``struct sock *``
        :param head: ``struct sk_buff_head *`` of its ``sk_error_queue``
        :param counted: its ``sk_rmem_alloc``
        """
        total = 0
        for address, data in self._queue(head):
            if self._pkt_type.get(data) != _PACKET_OUTGOING:
                continue
            if untagged(self._image, self._memory.word_at(data, self._sk)) != sock:
                raise FaultError("a buffer in the error queue is of another socket", address)
            total += self._truesize.get(data)
            if total > counted:
                raise FaultError("the error queue has more bytes than its socket counts", address)
        return total

    def pure_zerocopy(self, head: int, root: int, counted: int) -> int:
        """
        Return the bytes of ``sk_wmem_queued`` that belong to user space.

        Of a buffer that has only pages of ``MSG_ZEROCOPY`` (``skb_zcopy_pure()``),
        ``__zerocopy_sg_from_iter()`` adds the pages to the counter and charges nothing. What
        ``tcp_wmem_free_skb()`` uncharges is ``SKB_TRUESIZE(skb_end_offset(skb))``.

        :param head: ``struct sk_buff_head *``, ``sk_write_queue``
        :param root: ``struct rb_root *``, ``tcp_rtx_queue``
        :param counted: ``sk_wmem_queued``
        """
        total = uncharged = 0
        for queue in (self._queue(head), self._tree(root)):
            for address, data in queue:
                truesize = self._truesize.get(data)
                total += truesize
                if total > counted:
                    raise FaultError("the queue has more bytes than its socket counts", address)
                start = self._memory.word_at(data, self._head)
                end = self._end.get(data)
                # skb_end_offset(): skb->end is an offset on 64-bit machines
                offset = end if self._memory.word_size == 8 else end - start
                shared = self._memory.read(start + offset, self._shared_size)
                if self._flags.get(shared) & self._pure_zerocopy:
                    uncharged += max(truesize - offset - self._overhead, 0)
        return uncharged

    def _queue(self, head: int) -> Iterator[tuple[int, bytes]]:
        """Iterate over a ``struct sk_buff_head``: the address and the bytes of each buffer."""
        head = untagged(self._image, head)
        seen = {head}
        address = untagged(self._image, self._memory.word(head + self._next))
        while address not in seen:
            seen.add(address)
            data = self._read(address)
            yield address, data
            address = untagged(self._image, self._memory.word_at(data, self._next))
        if address != head:
            raise FaultError("the queue does not lead back to its head", address)

    def _tree(self, root: int) -> Iterator[tuple[int, bytes]]:
        """Iterate over a ``struct rb_root`` of buffers."""
        seen: set[int] = set()
        todo = [self._memory.word(root)]  # rb_node is its only member
        while todo:
            node = todo.pop()
            if not node:
                continue
            if node in seen:
                raise FaultError("the tree has a node twice", node)
            seen.add(node)
            data = self._read(node - self._rbnode)
            yield node - self._rbnode, data
            todo += [self._memory.word_at(data, self._rbnode + child) for child in self._children]

    def _read(self, address: int) -> bytes:
        data = self._memory.read(address, self._skb_size)
        # Each buffer counts itself: this bounds how many there can be.
        if self._truesize.get(data) < self._skb_size:
            raise FaultError("not a socket buffer", address)
        return data
