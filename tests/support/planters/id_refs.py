# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``id_refs`` must name."""

from __future__ import annotations

from support.planting import Fault, NoVictim, Planter, Subject


def online(subject: Subject, size: int) -> Fault:
    """Let the ID of a memcg have other references than were found."""
    path = subject.victims()[0]
    return of_memcg(subject, subject.paths[path], path, size)


def removed(subject: Subject, size: int) -> Fault:
    """Let the ID of a removed memcg, which swap entries keep, have other references."""
    for memcg in subject.snapshot.memcgs.values():
        refs = subject.snapshot.css.get(memcg.address)
        if memcg.offline and refs and refs.id_refs > 1 and subject.may_change(memcg.path):
            return of_memcg(subject, memcg.address, memcg.path, size)
    raise NoVictim("no memcg that was removed has entries in swap")


def of_memcg(subject: Subject, address: int, path: str, size: int) -> Fault:
    """Add to ``id.ref`` of a memcg."""
    write = subject.add(subject.object("struct mem_cgroup *", address).id.ref, size)
    return Fault((write,), (path,), {(path, None, "id.ref", size)})


PLANTERS = (
    Planter("id.ref of a memcg", online, (1, -1, 5_000)),
    Planter("id.ref of a removed memcg", removed, (-1, 1, 5_000)),
)
