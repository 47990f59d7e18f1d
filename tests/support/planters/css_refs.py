# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``css_refs`` must name."""

from __future__ import annotations

from support.planting import Fault, NoVictim, Planter, Subject


def online(subject: Subject, size: int) -> Fault:
    """Let a memcg have other references than were found."""
    path = subject.victims()[0]
    return of_memcg(subject, subject.paths[path], path, size)


def removed(subject: Subject, size: int) -> Fault:
    """Let a memcg that was removed have other references than were found."""
    for memcg in subject.snapshot.memcgs.values():
        if memcg.offline and subject.may_change(memcg.path):
            return of_memcg(subject, memcg.address, memcg.path, size)
    raise NoVictim("no memcg was removed")


def of_memcg(subject: Subject, address: int, path: str, size: int) -> Fault:
    """Add to ``css.refcnt`` of a memcg."""
    memcg = subject.object("struct mem_cgroup *", address)
    write = subject.add(memcg.css.refcnt.data.count, size)
    return Fault((write,), (path,), {(path, None, "css.refcnt", size)})


PLANTERS = (
    Planter("css.refcnt of a memcg", online, (1, -1, 5_000, -5_000)),
    Planter("css.refcnt of a removed memcg", removed, (-1, 1, 5_000, -5_000)),
)
