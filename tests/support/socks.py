# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sockets of an image, for planters."""

from __future__ import annotations

from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.net.sock import Sock, SockReader
from support.planting import NoVictim, Subject


def accounting_sock(subject: Subject) -> Sock:
    """Return the socket of a victim that has charged most."""
    slabs = SlabReader(subject.image)
    reader = SockReader(subject.image, slabs)
    victims = set(subject.victims())
    socks = [
        sock
        for piece in scan_pages(subject.image)
        for slab in filter(None, map(slabs.slab, piece.slabs))
        for sock in reader.read(slab, subject.snapshot.memcgs)
        if sock.accounts and sock.charged and subject.path(sock.memcg) in victims
    ]
    if not socks:
        raise NoVictim("no socket has charged memory")
    return max(socks, key=lambda sock: (sock.charged, sock.address))
