# SPDX-License-Identifier: LGPL-2.1-or-later
"""The tables of docs/seeds.md."""

from __future__ import annotations

from typing import Any

from labkit import seeds
from labkit.cost import Guest
from labkit.seeds import SlabUse


def costs(*values: float) -> dict[tuple[str, bool], float]:
    keys = [(kind, which) for kind in ("object", "kmalloc", "page") for which in (False, True)]
    return dict(zip(keys, values, strict=True))


def test_stock() -> None:
    _, row = seeds.stock_table({"old": costs(100, 150, 1, 1, 1, 1)}).splitlines()
    assert row.split() == ["old", "100", "150", "50", "1.50", "x"]


def test_profiling_is_relative_to_the_first_row() -> None:
    table = seeds.profiling_table(
        {"never": costs(1, 1, 100, 200, 50, 400), "enabled": costs(1, 1, 110, 210, 75, 400)}
    )
    _, first, second = table.splitlines()
    assert first.split()[1::3] == ["100", "200", "50", "400"]
    assert second.split() == [
        *("enabled", "110", "+10.0", "%", "210", "+5.0", "%"),
        *("75", "+50.0", "%", "400", "+0.0", "%"),
    ]


def test_rss() -> None:
    old, new = (Guest(kernel, 2, 64) for kernel in seeds.RSS)
    counted = {old: {"fork": 1000.0}, new: {"fork": 800.0}}
    timed = {
        old: [{"fork": 10.0}, {"fork": 12.0}, {"fork": 90.0}],
        new: [{"fork": 6.0}, {"fork": 1.0}, {"fork": 7.0}],
    }
    _, row = seeds.rss_table(counted, timed).splitlines()
    # the medians are 12 and 6
    assert row.split() == ["2", "64", "fork", "1,000", "800", "0.80", "x", "0.50", "x"]


def row(cache: int, memcg: int | None, objects: int, slabs: int = 0) -> dict[str, Any]:
    return {
        "cache_address": cache,
        "memcg_address": memcg,
        "objects": objects,
        "size": 1000,
        "bytes": 1000 * objects,
        "slabs": slabs,
        "slab_bytes": 4096 * slabs,
    }


def test_slabs_of_each_memcg_and_shared() -> None:
    """Four objects fit into a slab. Caches from which no memcg has objects do not count."""
    by_memcg = [row(1, 7, 5), row(1, 8, 1), row(1, None, 2), row(2, None, 9)]
    use = seeds.slab_use(by_memcg, [row(1, None, 8, 2), row(2, None, 9, 3)])
    # two, one and one
    assert use == SlabUse(objects=8000, shared=2 * 4096, own=4 * 4096)
    _, text = seeds.slab_table({"7.3": use}).splitlines()
    assert text.split() == ["7.3", "8", "KiB", "8", "KiB", "97.7", "%", "16", "KiB", "48.8", "%"]
