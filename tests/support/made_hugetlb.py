# SPDX-License-Identifier: LGPL-2.1-or-later
"""Cgroups of hugetlb that are made by hand: ``/`` has ``/a``, which has ``/a/b``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running
from memcg_inspect.model_hugetlb import Hugetlb, HugetlbCgroup, HugetlbSize
from support.made import snapshot

ROOT, A, B, GONE = 0x100, 0x200, 0x300, 0x400
SIZES = (HugetlbSize("2MB", 9), HugetlbSize("1GB", 18))
HUGE, GIGANTIC = 512, 1 << 18

#: Huge pages: of /a two on node 0, of /a/b one of 2 MB on node 0 and three on node 1, and a page of
#: 1 GB on node 1.
CHARGED = {(A, 9, 0): 2 * HUGE, (B, 9, 0): HUGE, (B, 9, 1): 3 * HUGE, (B, 18, 1): GIGANTIC}
#: What the page counters are, without descendants, by cgroup and index of the size.
OWN = {(A, 0): 2 * HUGE, (B, 0): 4 * HUGE, (B, 1): GIGANTIC}
ON_NODES = {(A, 0, 0): 2 * HUGE, (B, 0, 0): HUGE, (B, 0, 1): 3 * HUGE, (B, 1, 1): GIGANTIC}
_PATHS = {ROOT: "/", A: "/a", B: "/a/b", GONE: "/a/b"}
_PARENTS = {ROOT: None, A: ROOT, B: A, GONE: A}


def made(
    own: Mapping[tuple[int, int], int] | None = None,
    on_nodes: Mapping[tuple[int, int, int], int] | None = None,
    charged: Mapping[tuple[int, int, int], int] | None = None,
    running: tuple[Running, ...] = (),
    **more: Any,
) -> Snapshot:
    """
    Return a snapshot.

    :param own: what is added to page counters, and to those above them
    :param on_nodes: what is added to usages of nodes
    :param charged: other huge pages than :data:`CHARGED`
    """
    usage = {(cgroup, n): 0 for cgroup in _PATHS for n in range(len(SIZES))}
    for source in (OWN, own or {}):
        for (cgroup, n), pages in source.items():
            above: int | None = cgroup
            while above is not None:
                usage[above, n] += pages
                above = _PARENTS[above]
    nodes = {(c, n, nid): 0 for c in _PATHS for n in range(len(SIZES)) for nid in (0, 1)}
    for counts in (ON_NODES, on_nodes or {}):
        for where, pages in counts.items():
            nodes[where] += pages
    cgroups = {
        cgroup: HugetlbCgroup(
            cgroup,
            path,
            _PARENTS[cgroup],
            cgroup != GONE,
            tuple(usage[cgroup, n] for n in range(len(SIZES))),
            {(n, nid): pages for (c, n, nid), pages in nodes.items() if c == cgroup},
        )
        for cgroup, path in _PATHS.items()
    }
    given = {"moves_usage": True, "is_locked": False, **more}
    hugetlb = Hugetlb(SIZES, cgroups, CHARGED if charged is None else charged, (0, 1), **given)
    return snapshot(hugetlb=hugetlb, running=running)


def alone(taken: Snapshot, cgroup: int, n: int, pages: int) -> Snapshot:
    """Return a snapshot in which one page counter is off, and those above it are not."""
    one = taken.hugetlb.cgroups[cgroup]
    usage = tuple(u + pages * (i == n) for i, u in enumerate(one.usage))
    cgroups = {**taken.hugetlb.cgroups, cgroup: one._replace(usage=usage)}
    return replace(taken, hugetlb=replace(taken.hugetlb, cgroups=cgroups))
