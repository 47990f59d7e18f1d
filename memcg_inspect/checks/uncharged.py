# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Objects that no memcg pays for
------------------------------

The kernel charges every object of a cache with ``SLAB_ACCOUNT``, with these exceptions:
``current_obj_cgroup()`` returned none (root memcg, kernel threads, interrupts), charging was not on
yet (``memcg_kmem_online()``), or there was no memory for the vector of the slab
(``alloc_slab_obj_exts()``). Nothing in memory tells which it was, or who allocated the object. So
the kernel may leave out any single charge, and these objects are information, not findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from memcg_inspect.checks.identities.alloc_tags import site_name
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.report import Uncharged, UnchargedSite

__all__ = ("uncharged",)


def uncharged(snapshot: Snapshot) -> tuple[Uncharged, ...]:
    """Return the caches that always account and have objects that no memcg pays for, by size."""
    names: dict[int, tuple[str, int]] = {}
    objects: Counter[int] = Counter()
    unknown: set[int] = set()
    for usage in snapshot.slab_usage:
        if not usage.accounts or usage.kfence:
            continue
        names[usage.address] = usage.cache, usage.size
        if usage.charged is None:
            unknown.add(usage.address)
        else:
            objects[usage.address] += max(usage.inuse - usage.charged, 0)
    sites = _sites(snapshot)
    found = [
        Uncharged(
            cache=name,
            address=address,
            objects=None if address in unknown else objects[address],
            bytes=None if address in unknown else objects[address] * size,
            sites=None if sites is None else sites[address],
        )
        for address, (name, size) in names.items()
        if objects[address] or address in unknown
    ]
    return tuple(sorted(found, key=lambda cache: (-(cache.bytes or 0), cache.cache)))


def _sites(snapshot: Snapshot) -> defaultdict[int, tuple[UnchargedSite, ...]] | None:
    """Return the call sites of such objects by ``struct kmem_cache *``."""
    profile = snapshot.profile
    if profile is None or profile.why_not is not None:
        return None
    found: defaultdict[int, tuple[UnchargedSite, ...]] = defaultdict(tuple)
    for (cache, tag), count in profile.uncharged.most_common():
        site = profile.sites.get(tag)
        name = f"no call site at {tag:#x}" if site is None else site_name(site)
        found[cache] += (UnchargedSite(name, count),)
    return found
