# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``alloc_tags``
-----------------------

Of kernels that profile allocations. For each call site, whoever pays: its counters of bytes
and of calls are those of all slab objects, percpu allocations and blocks of pages that refer
to it.

What refers to no call site is in no counter either: memory of early boot, of caches and
vectors that are left out, and references marked as empty. Nothing is excepted but counters
that several sites share (modules on architectures with weak percpu variables), which are not
to be divided. Some kernels count of a percpu allocation what one CPU has of it; which rule a
kernel follows shows in its counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from memcg_inspect.checks.ledger import Amount
from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import CallSite, Row

__all__ = ("alloc_tag_rows", "counts_one_cpu", "site_name")


def site_name(site: CallSite) -> str:
    """Return the name of a call site, as ``/proc/allocinfo`` has it."""
    module = f"[{site.module}] " if site.module else ""
    return f"{site.site} {module}func:{site.function}"


def counts_one_cpu(profile: Profile) -> bool:
    """Return whether counters hold, of percpu allocations, what one CPU has of them."""
    found = profile.by_site()

    def differing(rule: bool) -> int:
        return sum(
            sum(_sizes(profile, tag, found.get(tag, {}), rule).values()) != profile.sites[tag].bytes
            for tag in profile.one_cpu
            if tag in profile.sites
        )

    return differing(True) < differing(False)


def alloc_tag_rows(snapshot: Snapshot) -> list[Row]:
    """Hold what refers to call sites against their counters; sites without either are left out."""
    profile = snapshot.profile
    if profile is None:
        return []
    names = _names(profile)
    one_cpu = counts_one_cpu(profile)
    shared = Counter(site.counters for site in profile.sites.values() if site.counters)
    found = profile.by_site()
    rows: list[Row] = []
    for tag in [*profile.sites, *(found.keys() - profile.sites.keys())]:
        site, kinds = profile.sites.get(tag), found.get(tag, {})
        if site is not None and not kinds and site.bytes == site.calls == 0:
            continue
        is_shared = site is not None and shared[site.counters] > 1
        sizes = _sizes(profile, tag, kinds, one_cpu)
        calls = {kind: amount.charges for kind, amount in kinds.items()}
        rows += _rows(profile, names[tag], site, (sizes, calls), is_shared)
    return rows


def _rows(
    profile: Profile,
    name: str,
    site: CallSite | None,
    found: tuple[Mapping[str, int], Mapping[str, int]],
    is_shared: bool,
) -> Iterator[Row]:
    missing = profile.missing
    counted: tuple[int | None, int | None] = (None, None)
    if site is not None:
        counted = site.bytes, site.calls
    elif missing is None:
        # No counter counts a reference to an address that is no call site. If references may be
        # missing, so may one of these.
        counted = (0, 0)
    if is_shared:
        missing = "several call sites share one counter"
    for unit, sizes, counter in zip(("bytes", "references"), found, counted, strict=True):
        yield make_row(
            "alloc_tags",
            memcg=None,
            nid=None,
            item=name,
            unit="bytes" if unit == "bytes" else "references",
            found=sizes,
            claimed=None if counter is None else {"counter": counter},
            missing=missing,
            missing_hides_both=is_shared,
            unread="the counters of the call site are not in the image",
        )


def _sizes(
    profile: Profile, tag: int, kinds: Mapping[str, Amount], one_cpu: bool
) -> dict[str, int]:
    sizes = {kind: amount.bytes for kind, amount in kinds.items()}
    if one_cpu and "percpu" in sizes:
        sizes["percpu"] = profile.one_cpu[tag]
    return sizes


def _names(profile: Profile) -> dict[int, str]:
    """Names of all call sites, numbered where one line has several of them."""
    names: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for tag, site in profile.sites.items():
        name = site_name(site)
        seen[name] += 1
        names[tag] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    for tag in sorted(profile.codetags() - names.keys()):
        names[tag] = f"no call site at {tag:#x}"
    return names
