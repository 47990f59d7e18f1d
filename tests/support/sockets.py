# SPDX-License-Identifier: LGPL-2.1-or-later
"""Protocols of sockets."""

from __future__ import annotations

from drgn import Object

#: Names of protocols, by family (AF_UNIX, AF_INET, AF_INET6) and type of the socket.
PROTOCOLS = {
    (1, 1): "UNIX-STREAM", (1, 2): "UNIX", (1, 5): "UNIX",
    (2, 1): "TCP", (2, 2): "UDP", (10, 1): "TCPv6", (10, 2): "UDPv6",
}  # fmt: skip


def protocol_of(sock: Object) -> str:
    """Return the name of a socket's protocol. Its cache does not tell, since caches are merged."""
    return PROTOCOLS[sock.__sk_common.skc_family.value_(), sock.sk_type.value_()]
