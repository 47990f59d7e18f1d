# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sockets
-------

Mirrors ``struct sock`` and ``struct proto`` of :linux:`net/core/sock.c`, and
``mem_cgroup_sk_alloc()`` of :linux:`mm/memcontrol.c`.

Sockets are found in the slabs of the caches of their protocols, not through open files. Sockets
without a file, such as orphans and sockets that wait for ``accept()``, are charged, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from drgn import FaultError, Object, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.mm.kfence import kfence_object, kfence_pages
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.model import Coverage

__all__ = ("Protocol", "Sock", "SockReader", "socket_caches")


class Sock(NamedTuple):
    """
    One ``struct sock`` that refers to a memcg.

    :ivar address: ``struct sock *``
    :ivar memcg: ``sk_memcg``, a ``struct mem_cgroup *``; the socket holds a reference to it
    :ivar charged: bytes charged to the memcg: the sum of ``sk_forward_alloc``, ``sk_rmem_alloc``
        and ``sk_wmem_queued``; 0 for protocols without memory accounting
    :ivar protocol: name of its ``struct proto``
    """

    address: int
    memcg: int
    charged: int
    protocol: str


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
    name = proto.name.string_().decode(errors="backslashreplace")
    return Protocol(name, bool(proto.memory_allocated))


class SockReader:
    """
    Reader of the sockets in slabs.

    :ivar coverage: counts the sockets that were read, and what is unreadable
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
        self.caches = socket_caches(image, self.coverage) if protocols is None else protocols
        self._protocols: dict[int, Protocol] = {}
        self._kfence = kfence_pages(image)
        sock = image.type("struct sock")
        self._memcg = offsetof(sock, "sk_memcg")
        self._refs = offsetof(sock, "__sk_common.skc_refcnt")
        self._amounts = [
            offsetof(sock, name)
            for name in ("sk_forward_alloc", "sk_backlog.rmem_alloc", "sk_wmem_queued")
        ]
        self._proto = offsetof(sock, "__sk_common.skc_prot")
        last = max(self._memcg, self._refs, self._proto, *self._amounts)
        self._size = last + self.memory.word_size

    def read(self, slab: Slab, memcgs: Container[int]) -> Iterator[Sock]:
        """
        Return the sockets in a slab that refer to a memcg.

        All slots of the slab are read, free ones included. A slot is a socket if its
        ``skc_refcnt`` is positive and its ``sk_memcg`` is a memcg: the refcount of a socket that
        was freed is 0, and it is most unlikely that anything else satisfies both.

        :param memcgs: ``struct mem_cgroup *`` of all memcgs
        """
        of_cache = self.caches.get(slab.cache.address)
        if of_cache is None:
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
                # The page of a freed object of KFENCE is not mapped (kfence_protect()).
                if slab.page not in self._kfence:
                    self.coverage.miss("socket", address, str(error))
                continue
            memcg = self.memory.word_at(data, self._memcg)
            if memcg in memcgs and self._int(data, self._refs) > 0:
                self.coverage.read += 1
                proto = self.memory.word_at(data, self._proto)
                protocol = self._protocol_at(proto) or of_cache
                charged = sum(self._int(data, at) for at in self._amounts)
                yield Sock(address, memcg, charged if protocol.accounts else 0, protocol.name)

    def _protocol_at(self, address: int) -> Protocol | None:
        """
        Return the protocol of a socket.

        It is not that of the cache where caches are merged. It may not be on the list of
        protocols: kTLS, sockmap and MPTCP replace it by a modified copy.
        """
        if address not in self._protocols:
            try:
                proto = Object(self.image.prog, "struct proto *", address)
                self._protocols[address] = _protocol(proto)
            except FaultError as error:
                self.coverage.miss("protocol of a socket", address, str(error))
                return None
        return self._protocols[address]

    def _int(self, data: bytes, offset: int) -> int:
        return int.from_bytes(data[offset : offset + 4], self.memory.order, signed=True)
