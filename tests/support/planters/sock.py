# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``sock`` must name."""

from __future__ import annotations

from support.counter_planter import counter
from support.planting import Fault, Planter, Subject
from support.socks import accounting_sock


def memory(subject: Subject, size: int) -> Fault:
    """Let a socket have charged pages that its memcg does not count."""
    sock = accounting_sock(subject)
    path, page = subject.path(sock.memcg), subject.snapshot.image.page_size
    write = subject.add(subject.object("struct sock *", sock.address).sk_forward_alloc, size * page)
    return Fault((write,), (path,), {(path, None, "MEMCG_SOCK", -size)})


PLANTERS = (
    counter("sock", None, ("MEMCG_SOCK",), (1, -1, 2_000)),
    Planter("memory of a socket", memory, (2, 1, 3_000)),
)
