# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sockets
-------

Mirrors ``struct sock`` and ``struct proto`` of :linux:`net/core/sock.c`, and
``mem_cgroup_sk_alloc()`` of :linux:`mm/memcontrol.c`.

Sockets are found in the slabs of the caches of their protocols, not through open files. Sockets
without a file, such as orphans and sockets that wait for ``accept()``, are charged, too. Many
protocols have no cache (netlink, packet, vsock, AF_ALG, tun): ``sk_prot_alloc()`` takes their
sockets from ``kmalloc()``. These charge no memory, but they hold a reference to the memcg.

A socket charges whole pages (``__sk_mem_schedule()``) and takes its buffers' bytes from them
(``sk_mem_charge()``). What is left is its ``sk_forward_alloc``. So the bytes in its queues and
``sk_forward_alloc`` together are whole pages: ``inet_sock_destruct()`` warns if anything is left
of the latter when the queues are empty. Its counters ``sk_rmem_alloc`` and ``sk_wmem_queued``
include some bytes that are not charged; :class:`~memcg_inspect.linux.net.skbuff.SkbReader` finds
them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.strings import text
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.mm.kfence import kfence_object, kfence_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.linux.net.ip_sockglue import socks_with_error_readers
from memcg_inspect.linux.net.skbuff import SkbReader
from memcg_inspect.linux.net.sock_destruct import SockUse
from memcg_inspect.model import Coverage

__all__ = ("UnknownCharge", "Protocol", "Sock", "SockReader", "socket_caches")


#: Protocols whose sockets this module knows how to read.
_TCP = frozenset({"TCP", "TCPv6"})
_MPTCP = frozenset({"MPTCP", "MPTCPv6"})
_SCTP = frozenset({"SCTP", "SCTPv6"})
_UDP = frozenset({"UDP", "UDPv6", "UDP-Lite", "UDPLITEv6"})
_KNOWN = _TCP | _MPTCP | _SCTP | _UDP

#: ``SK_USER_DATA_PSOCK``: ``sk_user_data`` is a ``struct sk_psock``.
_PSOCK = 4
#: How the names of caches begin that kmalloc() takes sockets from.
_GENERAL = ("kmalloc", "kmem_cache 0x")
#: How often a socket that has not charged whole pages is read: on a running kernel it may have
#: been changed meanwhile.
_READS = 4


class UnknownCharge(NamedTuple):
    """
    Why what a socket has charged is not known.

    :ivar reason: in words, for the report
    :ivar either_way: whether it may have charged less than was read. Otherwise only more.
    """

    reason: str
    either_way: bool


class Sock(NamedTuple):
    """
    One ``struct sock`` that refers to a memcg.

    :ivar address: ``struct sock *``
    :ivar memcg: ``sk_memcg``, a ``struct mem_cgroup *``; the socket holds a reference to it
    :ivar charged: bytes charged to the memcg; 0 for protocols without memory accounting. Whole
        pages, except for MPTCP, whose sockets lend bytes to one another.
    :ivar protocol: name of its ``struct proto``
    :ivar accounts: whether the protocol accounts memory
    :ivar remainder: bytes by which what was read differs from *charged*
    :ivar unknown: why *charged* may not be what it has charged; ``None`` if it is
    """

    address: int
    memcg: int
    charged: int
    protocol: str
    accounts: bool = False
    remainder: int = 0
    unknown: UnknownCharge | None = None


class Protocol(NamedTuple):
    """
    One ``struct proto``.

    :ivar name: its name, e.g. ``TCP``
    :ivar accounts: whether it accounts memory (``memory_allocated``)
    """

    name: str
    accounts: bool


def socket_caches(image: Image, coverage: Coverage) -> dict[int, Protocol]:
    """
    Return the slab caches of sockets.

    :param coverage: counts the protocols that are unreadable
    :return: protocol by ``struct kmem_cache *``. If protocols share a cache, one that accounts
        memory is preferred; empty without ``CONFIG_NET``
    """
    found: dict[int, Protocol] = {}
    try:
        head = image.object("proto_list").address_of_()
    except UnknownKernelError:
        return found  # CONFIG_NET=n

    def missed(error: FaultError) -> None:
        coverage.miss("protocol of sockets", error.address, str(error))

    for proto in list_entries(image, "struct proto", head, "node", missed):
        try:
            cache = proto.slab.value_()
            if not cache:
                continue
            read = _protocol(proto)
            # Slab caches are merged: one may serve several protocols.
            if cache not in found or read.accounts:
                found[cache] = read
        except FaultError as error:
            missed(error)
    return found


def _protocol(proto: Object) -> Protocol:
    name = text(proto.name.string_())
    return Protocol(name, bool(proto.memory_allocated))


class SockReader:
    """
    Reader of the sockets in slabs.

    :ivar coverage: counts the sockets that were read, and what is unreadable
    :ivar queues: counts the queues of sockets that are unreadable
    :ivar others: counts the sockets of protocols without a cache that were read, and slabs that are
        unreadable
    :ivar caches: result of :func:`socket_caches()`
    """

    def __init__(
        self,
        image: Image,
        slabs: SlabReader,
        protocols: Mapping[int, Protocol] | None = None,
    ) -> None:
        """:param protocols: result of :func:`socket_caches`; it is read if not given"""
        self.image = image
        self.memory = image.memory
        self.slabs = slabs
        self.coverage = Coverage()
        self.queues = Coverage()
        self.others = Coverage()
        self.caches = socket_caches(image, self.coverage) if protocols is None else protocols
        self._protocols: dict[int, Protocol] = {}
        self._creators: dict[int, Protocol | None] = {}
        self._kfence = kfence_pages(image)
        sock = image.type("struct sock")
        self._memcg = offsetof(sock, "sk_memcg")
        self._use = SockUse(image)
        self._proto = offsetof(sock, "__sk_common.skc_prot")
        self._creator = offsetof(sock, "sk_prot_creator")
        self._size = sizeof(sock)

    @cached_property
    def _charges(self) -> _ChargeReader:
        # Without CONFIG_INET, no protocol accounts memory, and the types are not there.
        return _ChargeReader(self.image)

    @cached_property
    def _error_readers(self) -> set[int]:
        # The truesize of a buffer is never whole pages, so this is needed only for sockets that
        # have not charged whole pages.
        socks = socks_with_error_readers(self.image, self.coverage)
        return {untagged(self.image, sock) for sock in socks}

    def read(self, slab: Slab, memcgs: Container[int]) -> Iterator[Sock]:
        """
        Return the sockets in a slab that refer to a memcg.

        All slots of the slab are read, free ones included. A slot is a socket if it is in use (see
        :class:`~memcg_inspect.linux.net.sock_destruct.SockUse`) and its ``sk_memcg`` is a memcg: it
        is most unlikely that anything else satisfies this.

        :param memcgs: ``struct mem_cgroup *`` of all memcgs
        """
        of_cache = self.caches.get(slab.cache.address)
        if of_cache is None:
            yield from self._without_cache(slab, memcgs)
            return
        if slab.page in self._kfence:
            try:
                kfence_object(self.image, slab.page)
            except FaultError as error:
                # Where in its page the socket begins is not known.
                self.coverage.miss("socket", error.address, str(error))
                return
        for address in self.slabs.objects(slab):
            try:
                data = self.memory.read(address, self._size)
            except FaultError as error:
                if not self.slabs.has_freed(slab):
                    self.coverage.miss("socket", address, str(error))
                continue
            memcg = self.memory.word_at(data, self._memcg)
            if memcg in memcgs and self._use.of(data):
                self.coverage.read += 1
                proto = self.memory.word_at(data, self._proto)
                yield self._sock(address, memcg, data, self._protocol_at(proto) or of_cache)

    def may_read(self, cache: SlabCache) -> bool:
        """Return whether slabs of a cache may have sockets."""
        # A name that could not be read may be that of a cache of kmalloc().
        is_general = cache.object_size >= self._size and cache.name.startswith(_GENERAL)
        return is_general or cache.address in self.caches

    def in_use(self, slab: Slab) -> Iterator[int]:
        """
        Return the sockets in a slab of a protocol's cache, whether they refer to a memcg or not.

        A slot is a socket if it is in use and a protocol of the kernel made it. (``skc_prot`` can
        be a copy, of kTLS for example.)

        :return: ``struct sock *``
        """
        if slab.cache.address not in self.caches:
            return
        for address in self.slabs.objects(slab):
            try:
                data = self.memory.read(address, self._size)
            except FaultError:
                continue  # read() counts it
            if self.memory.word_at(data, self._creator) in self._all and self._use.of(data):
                yield address

    @cached_property
    def _all(self) -> frozenset[int]:
        """All protocols, ``struct proto *``, as far as their list can be read."""
        try:
            head = self.image.object("proto_list").address_of_()
        except UnknownKernelError:
            return frozenset()  # CONFIG_NET=n
        # socket_caches() has counted what is unreadable.
        protocols = list_entries(self.image, "struct proto", head, "node", lambda _: None)
        return frozenset(proto.value_() for proto in protocols)

    def _without_cache(self, slab: Slab, memcgs: Container[int]) -> Iterator[Sock]:
        """Return the sockets of protocols that have no cache of their own, from kmalloc()."""
        size = slab.cache.object_size
        if not slab.objects or not self.may_read(slab.cache):
            return
        first, stride = self.slabs.address(slab, 0), slab.cache.size
        try:
            data = self.memory.read(first, (slab.objects - 1) * stride + self._size)
            found = self.memory.words(data, self._memcg, stride)
            for number, memcg in enumerate(found):
                sock = data[number * stride : number * stride + self._size]
                if memcg in memcgs and self._use.of(sock):
                    protocol = self._of_kmalloc(sock, size)
                    if protocol is not None:
                        self.others.read += 1
                        yield self._sock(first + number * stride, memcg, sock, protocol)
        except FaultError as error:
            if not self.slabs.has_freed(slab):
                self.others.miss("slab that may have sockets", error.address, str(error))

    def _of_kmalloc(self, data: bytes, size: int) -> Protocol | None:
        """Return the protocol that made a socket; ``None`` if this is no socket from kmalloc()."""
        creator = self.memory.word_at(data, self._creator)
        if creator not in self._creators:
            # Protocols such as that of tun are on no list (proto_register()).
            try:
                proto = self.image.pointer("struct proto *", creator)
                made = not proto.slab and self._size <= int(proto.obj_size) <= size
                self._creators[creator] = _protocol(proto) if made else None
            except FaultError:
                self._creators[creator] = None
        return self._creators[creator]

    def _sock(self, address: int, memcg: int, data: bytes, protocol: Protocol) -> Sock:
        name = protocol.name
        if not protocol.accounts:
            return Sock(address, memcg, 0, name)
        charge = self._charges.read(address, data, name)
        for _ in range(_READS - 1):
            if not charge.remainder:
                break
            try:
                data = self.memory.read(address, self._size)
            except FaultError:
                break
            charge = self._charges.read(address, data, name)
        # On a running kernel, a queue changes while it is read.
        if charge.fault is not None and not self.image.is_moving:
            self.queues.miss("queue of a socket", charge.fault.address, str(charge.fault))
        unknown = charge.unknown
        if charge.remainder and unknown is None and address in self._error_readers:
            reason = f"a task is reading the error queue of the {name} socket {address:#x}"
            unknown = UnknownCharge(reason, True)
        return Sock(address, memcg, charge.bytes, name, True, charge.remainder, unknown)

    def _protocol_at(self, address: int) -> Protocol | None:
        """
        Return the protocol of a socket.

        It is not that of the cache where caches are merged. It may not be on the list of
        protocols: kTLS, sockmap and MPTCP replace it by a modified copy.
        """
        if address not in self._protocols:
            try:
                proto = self.image.pointer("struct proto *", address)
                self._protocols[address] = _protocol(proto)
            except FaultError as error:
                self.coverage.miss("protocol of a socket", address, str(error))
                return None
        return self._protocols[address]


class _Charge(NamedTuple):
    """What one socket has charged; see :class:`Sock`."""

    bytes: int
    remainder: int
    unknown: UnknownCharge | None = None
    fault: FaultError | None = None


class _ChargeReader:
    """Reader of what sockets have charged, by protocol."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._memory = image.memory
        self._page = mem_map(image).page_size
        self._skbs = SkbReader(image)
        sock = image.type("struct sock")
        self._forward = offsetof(sock, "sk_forward_alloc")
        self._rmem = offsetof(sock, "sk_backlog.rmem_alloc")
        self._wmem = offsetof(sock, "sk_wmem_queued")
        self._owned = offsetof(sock, "sk_lock.owned")
        self._user_data = offsetof(sock, "sk_user_data")
        self._errors = offsetof(sock, "sk_error_queue")
        self._writes = offsetof(sock, "sk_write_queue")
        self._retransmits = offsetof(sock, "tcp_rtx_queue")
        self._ulp = offsetof(image.type("struct inet_connection_sock"), "icsk_ulp_ops")
        self._ulps: dict[int, str] = {0: ""}
        # In 6.1 and 6.12, MPTCP has a sk_forward_alloc of its own for what it receives.
        self._mptcp_forward: int | None = None
        if has_member(image, "struct mptcp_sock", "rmem_fwd_alloc"):
            self._mptcp_forward = offsetof(image.type("struct mptcp_sock"), "rmem_fwd_alloc")

    def read(self, address: int, data: bytes, protocol: str) -> _Charge:
        """
        Return what a socket has charged.

        :param address: ``struct sock *``
        :param data: the ``struct sock``
        :param protocol: name of its ``struct proto``, which accounts memory
        """
        counted = sum(self._int(data, at) for at in (self._forward, self._rmem, self._wmem))
        try:
            found = counted - self._uncharged(address, data, protocol)
            ulp = self._ulp_of(address) if protocol in _TCP else ""
            if protocol in _MPTCP and self._mptcp_forward is not None:
                found += self._int(self._memory.read(address + self._mptcp_forward, 4), 0)
        except FaultError as error:
            reason = f"the queues of a {protocol} socket are not all in the image ({error})"
            return self._rounded(counted, UnknownCharge(reason, True))._replace(fault=error)
        if protocol in _MPTCP or ulp == "mptcp":
            reason = "MPTCP sockets may be charged for buffers that they are about to exchange"
            return _Charge(found, 0, UnknownCharge(reason, False))
        return self._rounded(found, self._why_unknown(address, data, protocol, ulp))

    def _rounded(self, found: int, unknown: UnknownCharge | None) -> _Charge:
        charged = (found + self._page // 2) // self._page * self._page
        return _Charge(charged, found - charged, unknown)

    def _uncharged(self, address: int, data: bytes, protocol: str) -> int:
        """Return the bytes that a socket counts and that are not charged."""
        rmem, wmem = self._int(data, self._rmem), self._int(data, self._wmem)
        head, found = address + self._errors, 0
        if self._memory.word_at(data, self._errors) != head:
            found += self._skbs.in_error_queue(address, head, rmem)
        if wmem and protocol in _TCP:
            writes, retransmits = address + self._writes, address + self._retransmits
            found += self._skbs.pure_zerocopy(writes, retransmits, wmem)
        return found

    def _why_unknown(
        self, address: int, data: bytes, protocol: str, ulp: str
    ) -> UnknownCharge | None:
        """Return why what a socket has charged is not known; ``None`` if it is."""
        if protocol not in _KNOWN:
            return UnknownCharge(f"how {protocol} sockets charge memory is not known", True)
        if protocol in _SCTP and self._int(data, self._wmem):
            reason = "SCTP counts a struct sctp_chunk for each chunk, and does not charge it"
            return UnknownCharge(reason, True)
        if self._int(data, self._owned):
            reason = f"the {protocol} socket {address:#x} is locked by a task (lock_sock())"
            return UnknownCharge(reason, True)
        if ulp or self._memory.word_at(data, self._user_data) & _PSOCK:
            reason = "kTLS and sockmap charge messages that no counter shows (sk_msg_alloc())"
            return UnknownCharge(reason, False)
        return None

    def _ulp_of(self, address: int) -> str:
        """
        Return the name of the upper layer protocol of a TCP socket; empty if it has none.

        :param address: ``struct inet_connection_sock *``
        :raises drgn.FaultError: if it cannot be read
        """
        ops = self._memory.word(address + self._ulp)
        if ops not in self._ulps:
            name = self._image.pointer("struct tcp_ulp_ops *", ops).name
            self._ulps[ops] = text(name.string_()) or "unnamed"
        return self._ulps[ops]

    def _int(self, data: bytes, offset: int) -> int:
        return int.from_bytes(data[offset : offset + 4], self._memory.order, signed=True)
