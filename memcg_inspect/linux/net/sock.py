# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sockets
-------

Mirrors ``struct sock`` and ``struct proto`` of :linux:`include/net/sock.h`, and the pages
behind ``struct sk_buff``.

Sockets are taken from the slabs of their protocols' caches, so that those without a file
(orphans, sockets that wait to be accepted) are found, too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from drgn import FaultError, Object, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.mm.kfence import kfence_object, kfence_pages
from memcg_inspect.linux.mm.slab import Slab, SlabReader
from memcg_inspect.model import Coverage

__all__ = ("Sock", "SockReader", "socket_caches")


class Sock(NamedTuple):
    """
    One ``struct sock`` that a memcg pays for, or that holds on to one.

    :ivar memcg: ``sk_memcg``
    :ivar charged: bytes charged: ``sk_forward_alloc``, ``sk_rmem_alloc`` and
        ``sk_wmem_queued``; 0 for protocols without memory accounting
    :ivar protocol: name of its ``struct proto``
    """

    address: int
    memcg: int
    charged: int
    protocol: str


class Protocol(NamedTuple):
    """A ``struct proto``: its name and whether it accounts memory."""

    name: str
    accounts: bool


def socket_caches(image: Image, coverage: Coverage) -> dict[int, Protocol]:
    """
    Return the protocols of sockets.

    :param coverage: counts those that cannot be read
    :return: by ``struct kmem_cache *``
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
            # Caches of equal size are merged: one protocol that accounts makes the cache count.
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
    Reads sockets out of slabs.

    :ivar coverage: sockets read, and slabs of sockets that could not be read
    """

    def __init__(self, image: Image, slabs: SlabReader) -> None:
        self.image = image
        self.memory = image.memory
        self.slabs = slabs
        self.coverage = Coverage()
        self.caches = socket_caches(image, self.coverage)
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
        Return the sockets in a slab that belong to one of some memcgs.

        A slot that is free holds what its last socket left behind, but no reference, or
        never held one: then a ``sk_memcg`` that is a memcg is as good as impossible.
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
                # kfence_protect() takes the page of a freed object out of the page tables.
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
        The protocol of a socket itself: caches are merged, also with those of other protocols.

        Not every one is on the list: kTLS, sockmaps and MPTCP give sockets copies.
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
