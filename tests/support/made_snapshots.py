# SPDX-License-Identifier: LGPL-2.1-or-later
"""Snapshots that are made up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memcg_inspect.model import ImageInfo
from memcg_inspect.model_snapshot import (
    ChargeSnapshot,
    ImageTime,
    SavedCharge,
    SavedCounter,
    SavedMemcg,
    SavedSite,
    SavedSlab,
)

BOOT = 1_700_000_000


def image(release: str = "7.3.4", host: str = "web") -> ImageInfo:
    return ImageInfo(release, "vmcore", (0, 1), 4, 4096, "memcg", "BTF", host)


def snapshot(
    charges: Mapping[tuple[str | None, int, str], int],
    uptime: int | None = 100,
    sites: Mapping[str, int] | None = None,
    unread: Mapping[str, int] | None = None,
    dying: Iterable[str] = (),
    boot: int = BOOT,
    release: str = "7.3.4",
    boot_id: str = "",
    missing: Mapping[str, str] | None = None,
) -> ChargeSnapshot:
    """
    Make a snapshot.

    :param charges: bytes by memcg, node and kind; of ``slab``, in objects of 64 bytes of one cache
    """
    paths = list(dict.fromkeys(["/", *(path for path, _, _ in charges if path is not None)]))
    memcgs = [SavedMemcg(path, number + 1, "online") for number, path in enumerate(paths)]
    memcgs += [SavedMemcg(path, None, "dying") for path in dying]
    found, slabs = [], []
    for (path, node, kind), size in charges.items():
        memcg = None if path is None else paths.index(path)
        if memcg is not None:
            found.append(SavedCharge(memcg, node, None, kind, "", size, size // 64))
        if kind == "slab":
            slabs.append(SavedSlab(memcg, node, "kmalloc-64", size, size // 64))
    return ChargeSnapshot(
        image=image(release),
        time=None if uptime is None else ImageTime((boot + uptime) * 10**9, uptime * 10**9),
        boot_id=boot_id,
        memcgs=tuple(memcgs),
        charges=tuple(found),
        slabs=tuple(slabs),
        sites=None
        if sites is None
        else tuple(SavedSite(0, 1, "slab", name, size, 1) for name, size in sites.items()),
        counters=(SavedCounter(0, None, "MEMCG_KMEM", 7, 6), SavedCounter(0, 1, "NR_SHMEM", -3)),
        missing=dict(missing or {}),
        unread=dict(unread or {}),
    )
