# SPDX-License-Identifier: LGPL-2.1-or-later
"""Sockets of an image, and their protocols."""

from __future__ import annotations

from functools import lru_cache

from drgn import Object

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.linux.net.sock import Sock, SockReader
from support.findings import by_path
from support.guests import GuestImage

#: Names of protocols, by family (AF_UNIX, AF_INET, AF_INET6) and type of the socket.
PROTOCOLS = {
    (1, 1): "UNIX-STREAM", (1, 2): "UNIX", (1, 5): "UNIX",
    (2, 1): "TCP", (2, 2): "UDP", (10, 1): "TCPv6", (10, 2): "UDPv6",
}  # fmt: skip


def protocol_of(sock: Object) -> str:
    """Return the name of a socket's protocol. Its cache does not tell, since caches are merged."""
    return PROTOCOLS[sock.__sk_common.skc_family.value_(), sock.sk_type.value_()]


@lru_cache(maxsize=1)
def sockets_of(image: GuestImage) -> dict[str, list[Sock]]:
    """Return the sockets of protocols that account memory, by the last part of their memcg."""
    drgn_image = image_of(image.program())
    slabs = SlabReader(drgn_image)
    reader = SockReader(drgn_image, slabs)
    paths = {address: path for path, address in by_path(image.report()).items()}
    found: dict[str, list[Sock]] = {}
    for piece in scan_pages(drgn_image):
        for slab in filter(None, map(slabs.slab, piece.slabs)):
            for sock in reader.read(slab, paths):
                if sock.accounts:
                    found.setdefault(paths[sock.memcg].rpartition("/")[2], []).append(sock)
    return found
