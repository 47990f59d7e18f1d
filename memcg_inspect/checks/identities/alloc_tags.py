# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``alloc_tags``
-----------------------

For each call site, on a kernel that profiles allocations: its counters of bytes and of calls are
the sums over all slab objects, percpu allocations and blocks of pages that refer to it, charged or
not.

Memory that refers to no call site is in no counter, either. This is memory of early boot, memory
of caches and vectors that the kernel leaves out, and memory whose reference is marked as empty. If
several sites share one counter (modules on architectures with weak percpu variables), their rows
cannot be verified. Some kernels count one CPU's copy of a percpu allocation, and others the copies
of all CPUs. The counters show which rule a kernel follows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.half_done import (
    LRU,
    PAGES,
    PERCPU,
    SLAB,
    STACK,
    VMALLOC,
    HalfDone,
    block_pages,
    pattern,
)
from memcg_inspect.checks.ledger import Amount
from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.rows import Missing, RowKey, make_row, missing_if
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Address, CallSite
from memcg_inspect.report import Row

__all__ = ("CHECK", "alloc_tag_rows", "counts_one_cpu", "site_name")

#: The most addresses that are not call sites and have rows of their own.
_MOST_UNKNOWN = 64
_UNREAD = "the counters of the call site are not in the image"


def site_name(site: CallSite) -> str:
    """Return the name of a call site, as ``/proc/allocinfo`` has it."""
    module = f"[{site.module}] " if site.module else ""
    return f"{site.site} {module}func:{site.function}"


def counts_one_cpu(profile: Profile) -> bool:
    """Return whether call sites count one CPU's size of percpu allocations."""
    found = profile.by_site()

    def differing(rule: bool) -> int:
        return sum(
            sum(_sizes(profile, [tag], found.get(tag, {}), rule).values())
            != profile.sites[tag].bytes
            for tag in profile.one_cpu
            if tag in profile.sites
        )

    return differing(True) < differing(False)


def alloc_tag_rows(snapshot: Snapshot) -> list[Row]:
    """Compare the references to call sites with the counters, unless both are zero."""
    profile = snapshot.profile
    if profile is None:
        return []
    names = _names(profile)
    one_cpu = counts_one_cpu(profile)
    shared = Counter(site.counters for site in profile.sites.values() if site.counters)
    found = profile.by_site()
    rows: list[Row] = []
    for tags in [*([tag] for tag in profile.sites), *_unknown(names, found, profile)]:
        tag = tags[0]
        site, kinds = profile.sites.get(tag), _sum(found.get(tag, {}) for tag in tags)
        if site is not None and not kinds and site.bytes == site.calls == 0:
            continue
        missing = missing_if(profile.missing)
        if site is not None and shared[site.counters] > 1:
            missing = Missing("several call sites share one counter", either_way=True)
        size, calls = _counters(profile, site)
        rows += [
            make_row(
                RowKey("alloc_tags", names[tag], "bytes"),
                _sizes(profile, tags, kinds, one_cpu),
                size,
                missing,
                unread=_UNREAD,
            ),
            make_row(
                RowKey("alloc_tags", names[tag], "references"),
                {kind: amount.charges for kind, amount in kinds.items()},
                calls,
                missing,
                unread=_UNREAD,
            ),
        ]
    return rows


def _counters(
    profile: Profile, site: CallSite | None
) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    """Return what a call site counts: bytes and calls."""
    size, calls = (None, None) if site is None else (site.bytes, site.calls)
    if site is None and profile.missing is None:
        # Without a call site there is no counter, unless the call site could not be read.
        size, calls = 0, 0
    return (
        None if size is None else {"counter": size},
        None if calls is None else {"counter": calls},
    )


def _unknown(
    names: Mapping[int, str], found: Mapping[int, Mapping[str, Amount]], profile: Profile
) -> Iterable[list[int]]:
    """Return the addresses that are not call sites; those that share a name together."""
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    for tag in sorted(found.keys() - profile.sites.keys()):
        by_name[names[tag]].append(tag)
    return by_name.values()


def _sum(some: Iterable[Mapping[str, Amount]]) -> Mapping[str, Amount]:
    """Return the sums by kind."""
    first, *others = some
    total = dict(first)
    for other in others:
        for kind, amount in other.items():
            total[kind] = total.get(kind, Amount(0, 0)).plus(amount)
    return total


def _sizes(
    profile: Profile, tags: Iterable[int], kinds: Mapping[str, Amount], one_cpu: bool
) -> dict[str, int]:
    sizes = {kind: amount.bytes for kind, amount in kinds.items()}
    if one_cpu and "percpu" in sizes:
        sizes["percpu"] = sum(profile.one_cpu[tag] for tag in tags)
    return sizes


def _names(profile: Profile) -> dict[int, str]:
    """Return the names of all call sites, numbered where one line has several."""
    names: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for tag, site in profile.sites.items():
        name = site_name(site)
        seen[name] += 1
        names[tag] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    unknown = sorted(profile.codetags() - names.keys())
    # Damaged memory can have any number of them, and a finding about each says nothing more.
    several = f"no call site at any of {len(unknown):,} addresses"
    for tag in unknown:
        names[tag] = several if len(unknown) > _MOST_UNKNOWN else f"no call site at {tag:#x}"
    return names


def _codetag(snapshot: Snapshot, row: Row) -> Address | None:
    """Return the ``struct codetag *`` of the call site of a row."""
    names = {} if snapshot.profile is None else _names(snapshot.profile)
    return next((tag for tag, name in names.items() if name == row.item), None)


def _not_kept(snapshot: Snapshot) -> str | None:
    if snapshot.profile is None:
        return "call sites were not read"
    return snapshot.profile.why_not


CHECK = Check(
    name="alloc_tags",
    counter="bytes and calls of each call site in `/proc/allocinfo`",
    unit="bytes, references",
    found=(
        "all slab objects, percpu allocations and blocks of pages that refer to the call site, "
        "charged or not. Call sites with nothing on both sides have no row"
    ),
    sources=("slab", "percpu", "kmem", "lru", "slab_page", "page"),
    places=("counter",),
    rows=alloc_tag_rows,
    not_kept=_not_kept,
    half_done=HalfDone(
        pattern(
            SLAB,
            PAGES,
            STACK,
            VMALLOC,
            LRU,
            PERCPU,
            r"alloc_|free_|split_|clear_page_tag|pgalloc_tag|put_page_tag",
        ),
        # While a huge page is split, each of its pages gets a reference.
        block_pages,
        in_pages=True,
        kinds=("object", "kmem", "folio"),
        subject=_codetag,
    ),
)
