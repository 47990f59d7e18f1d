# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``alloc_tags`` must name."""

from __future__ import annotations

from collections import Counter

from drgn.helpers.linux.percpu import per_cpu_ptr

from memcg_inspect.checks.identities.alloc_tags import site_name
from support.planting import Fault, NoVictim, Planter, Subject


def _counter(subject: Subject, member: str, size: int) -> Fault:
    profile = subject.snapshot.profile
    sites = [] if profile is None else list(profile.sites.values())
    names = Counter(map(site_name, sites))
    counters = Counter(site.counters for site in sites)
    alone = [s for s in sites if s.calls and names[site_name(s)] == counters[s.counters] == 1]
    if not alone:
        raise NoVictim("no call site has allocations")
    site = max(alone, key=lambda site: (site.calls or 0, site.address))
    percpu = subject.object("struct alloc_tag_counters *", site.counters)
    write = subject.add(per_cpu_ptr(percpu, 0).member_(member), size)
    return Fault((write,), (), {("?", None, site_name(site), size)})


def calls(subject: Subject, size: int) -> Fault:
    """Change the number of allocations of the busiest call site."""
    return _counter(subject, "calls", size)


def bytes_(subject: Subject, size: int) -> Fault:
    """Change the bytes of the busiest call site."""
    return _counter(subject, "bytes", size)


PLANTERS = (
    Planter("the allocations of a call site", calls, (1, -1, 5_000)),
    Planter("the bytes of a call site", bytes_, (4_096, 1, -1_000_003)),
)
