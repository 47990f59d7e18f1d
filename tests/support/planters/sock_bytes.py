# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``sock_bytes`` must name."""

from __future__ import annotations

from support.planting import Fault, Planter, Subject
from support.socks import accounting_sock


def memory(subject: Subject, size: int) -> Fault:
    """Let a socket have a part of a page that no counter has."""
    sock = accounting_sock(subject)
    path = subject.path(sock.memcg)
    write = subject.add(subject.object("struct sock *", sock.address).sk_forward_alloc, size)
    return Fault((write,), (path,), {(path, None, "sk_forward_alloc", 1)})


PLANTERS = (Planter("bytes of a socket", memory, (1, -300, 4_095)),)
