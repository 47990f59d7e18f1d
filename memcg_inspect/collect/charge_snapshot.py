# SPDX-License-Identifier: LGPL-2.1-or-later
"""The charges and counters of an image, as a snapshot keeps them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from memcg_inspect.checks.identities.kmem import kmem_rows
from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.collector import collect
from memcg_inspect.collect.owners import read_owners
from memcg_inspect.collect.ranges import jobs_of
from memcg_inspect.collect.slab_cells import SlabCells
from memcg_inspect.collect.slab_walk import read_slabs
from memcg_inspect.image.image import Image
from memcg_inspect.linux.drivers.random import boot_id
from memcg_inspect.linux.kernel.time.timekeeping import read_time
from memcg_inspect.linux.mm.memcontrol_vmstats import lruvec_items, memcg_items
from memcg_inspect.model import NUMA_NO_NODE, Coverage
from memcg_inspect.model_snapshot import (
    SITES,
    ChargeSnapshot,
    ImageTime,
    SavedCharge,
    SavedCounter,
    SavedMemcg,
    SavedSite,
    SavedSlab,
)

__all__ = ("take_snapshot",)

#: The most times that a running kernel is read.
_MOST_TRIES = 3


def take_snapshot(image: Image) -> ChargeSnapshot:
    """
    Read the charges and counters of an image.

    A running kernel is read again if not everything could be read, or if memory that changed led to
    an error.

    :raises ImageError: as :func:`~memcg_inspect.collect.collect`
    """
    found = None
    for tries in range(_MOST_TRIES if image.is_moving else 1):
        try:
            found = _take(image)
        except Exception:
            if found is None and (not image.is_moving or tries == _MOST_TRIES - 1):
                raise
            continue
        if found.is_whole or image.progress.stop:
            break
    assert found is not None
    return found


def _take(image: Image) -> ChargeSnapshot:
    payers = read_owners(image)
    if jobs_of(image) > 1:
        read = collect(image)
        # What it cannot read, the pass of collect() could not read, either.
        cells = read_slabs(image, payers.payer, defaultdict(Coverage))
    else:
        cells = SlabCells(image, payers.payer)
        read = collect(image, cells=cells)
    numbers = {address: number for number, address in enumerate(read.memcgs)}
    return ChargeSnapshot(
        image=read.image,
        time=read_time(image) or _own_time(read),
        boot_id=boot_id(image),
        memcgs=tuple(SavedMemcg(m.path, m.cgroup_id, m.state) for m in read.memcgs.values()),
        charges=tuple(_charges(read, numbers)),
        slabs=tuple(_slabs(cells, numbers)),
        sites=_sites(read, numbers),
        counters=tuple(_counters(image, read, numbers)),
        is_moving=image.is_moving,
        missing=_missing(read),
        unread={name: c.unreadable for name, c in read.coverage.items() if c.unreadable},
    )


def _number(numbers: Mapping[int, int], memcg: int | None) -> int | None:
    return None if memcg is None else numbers.get(memcg)


def _node(nid: int | None) -> int | None:
    return None if nid == NUMA_NO_NODE else nid


def _charges(read: Snapshot, numbers: Mapping[int, int]) -> Iterator[SavedCharge]:
    """Return the ledger by memcg, sorted: several obj_cgroups may have the same payer."""
    bytes_: Counter[tuple[int | None, int | None, int | None, str, str]] = Counter()
    charges: Counter[tuple[int | None, int | None, int | None, str, str]] = Counter()
    for entry, amount in read.ledger:
        objcg = read.objcgs.get(entry.payer)
        key = (
            _number(numbers, read.payer(entry.payer)),
            _node(entry.nid),
            None if objcg is None else objcg.nid,
            entry.kind,
            entry.detail,
        )
        bytes_[key] += amount.bytes
        charges[key] += amount.charges
    # None comes after all numbers.
    keys = sorted(bytes_, key=lambda key: [(part is None, part) for part in key])
    return (SavedCharge(*key, bytes_[key], charges[key]) for key in keys)


def _slabs(cells: SlabCells, numbers: Mapping[int, int]) -> Iterator[SavedSlab]:
    for (payer, cache, nid), cell in cells.cells.items():
        known = cells.caches.get(cache or 0)
        if known is not None and cell.objects:  # large kmallocs are pages, and so among the charges
            size = cell.bytes if payer is None else cell.charged
            yield SavedSlab(_number(numbers, payer), nid, known.name, size, cell.objects)


def _own_time(read: Snapshot) -> ImageTime | None:
    """Return the time of this machine, if that is the image."""
    if read.image.source != "live":
        return None
    return ImageTime(time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def _missing(read: Snapshot) -> dict[str, str]:
    """Return the kinds of charges that may not all be there."""
    kinds: tuple[ChargeKind, ...] = get_args(ChargeKind)
    reasons = ((kind, read.why_missing(kind)) for kind in kinds)
    found: dict[str, str] = {kind: why for kind, why in reasons if why is not None}
    if read.profile is not None and read.profile.missing is not None:
        found[SITES] = read.profile.missing
    return found


def _sites(read: Snapshot, numbers: Mapping[int, int]) -> tuple[SavedSite, ...] | None:
    """Return the allocations by call site; ``None`` if the kernel does not profile them."""
    profile = read.profile
    if profile is None or profile.why_not:
        return None
    found = []
    for use, amount in profile:
        site = profile.sites.get(use.codetag)
        memcg = _number(numbers, read.payer(use.payer)) if use.payer else None
        name = f"codetag {use.codetag:#x}" if site is None else f"{site.site} {site.function}"
        saved = SavedSite(memcg, _node(use.nid), use.kind, name, amount.bytes, amount.charges)
        found.append(saved)
    return tuple(found)


def _counters(image: Image, read: Snapshot, numbers: Mapping[int, int]) -> Iterator[SavedCounter]:
    """
    Return the counters of memcgs themselves that are not 0; those that are unknown are not.

    That of kernel memory is, also if it is 0.
    """
    places: list[tuple[int | None, Iterable[str]]] = [(None, memcg_items(image))]
    places += [(nid, lruvec_items(image)) for nid in read.counters.nids]
    found = {
        (row.memcg, row.nid, row.item): None
        if row.status == "unverifiable"
        else sum(row.found.values())
        for row in kmem_rows(read)
    }
    for memcg in read.live():
        for nid, items in places:
            for item in items:
                claim, key = read.counters.own(memcg.address, item, nid), (memcg.address, nid, item)
                if claim is not None and (claim.exact or key in found):
                    number = numbers[memcg.address]
                    yield SavedCounter(number, nid, item, claim.exact, found.get(key))
