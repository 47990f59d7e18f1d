# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The identities of zones, by hand and on images of kernels.

What the images must say is what the guest's own /proc/zoneinfo and /proc/buddyinfo said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.guests import (
    DEBIAN_KERNELS,
    KERNELS,
    GuestImage,
    Lab,
    series,
)
from support.made_zones import ANON, STATS, ZONE, made, with_stat
from support.planters import planters_of
from support.planting import Overlay, Subject, ended
from support.zones import buddyinfo, object_of, order_in_use, zone_in_use, zoneinfo

from memcg_inspect.checks.identities import (
    zone_free,
    zone_free_area,
    zone_lru,
    zone_mlock,
    zone_totals,
    zone_zspages,
)
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.checks.zone_pages import counters_of, zone_of
from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image
from memcg_inspect.model import Coverage, NodeStat, Running
from memcg_inspect.report import Report, Row

T = TypeVar("T")
IDENTITIES = ("zone_free", "zone_free_area", "zone_zspages", "zone_mlock", "zone_lru")

ROWS: dict[str, Any] = {
    "zone_free": zone_free.zone_free_rows,
    "zone_free_area": zone_free_area.zone_free_area_rows,
    "zone_zspages": zone_zspages.zone_zspages_rows,
    "zone_mlock": zone_mlock.zone_mlock_rows,
    "zone_lru": zone_lru.zone_lru_rows,
    "zone_totals": zone_totals.zone_total_rows,
}


def off(rows: list[Row]) -> dict[str, tuple[str, int | None]]:
    """Return the rows that are not exact: status and difference by item."""
    assert {row.nid for row in rows} <= {None, 1}
    return {row.item: (row.status, row.difference) for row in rows if row.status != "exact"}


@pytest.mark.parametrize("identity", ROWS)
def test_a_zone_at_rest_is_exact(identity: str) -> None:
    rows = ROWS[identity](made())
    assert rows and off(rows) == {}


@pytest.mark.parametrize(
    ("identity", "counter", "item"),
    [
        ("zone_free", "NR_FREE_PAGES", "NR_FREE_PAGES[ZONE_NORMAL]"),
        ("zone_zspages", "NR_ZSPAGES", "NR_ZSPAGES[ZONE_NORMAL]"),
        ("zone_mlock", "NR_MLOCK", "NR_MLOCK[ZONE_NORMAL]"),
        ("zone_lru", ANON[1], f"{ANON[1]}[ZONE_NORMAL]"),
        ("zone_lru", "NR_ZONE_ACTIVE_FILE", "NR_ZONE_ACTIVE_FILE[ZONE_NORMAL]"),
    ],
)
def test_a_counter_that_is_wrong(identity: str, counter: str, item: str) -> None:
    for amount in (1, -3, 4_000):
        taken = made(with_stat(counter, amount))
        assert off(ROWS[identity](taken)) == {item: ("differs", amount)}
        others = [name for name in IDENTITIES if name != identity]
        assert all(off(ROWS[name](taken)) == {} for name in others)


def test_generations_are_compared_by_type() -> None:
    """Only the lruvec knows which generations are active."""
    listed = {(1, 2, ANON[0]): 30, (1, 2, "NR_ZONE_UNEVICTABLE"): 5}
    rows = zone_lru.zone_lru_rows(made(listed=listed, has_generations=True))
    assert [row.item for row in rows] == [
        "NR_ZONE_UNEVICTABLE[ZONE_NORMAL]",
        "NR_ZONE_INACTIVE_ANON + NR_ZONE_ACTIVE_ANON[ZONE_NORMAL]",
    ]
    assert off(rows) == {}
    assert [counters_of(row.item) for row in rows] == [("NR_ZONE_UNEVICTABLE",), ANON]
    assert off(zone_lru.zone_lru_rows(made(listed=listed))) != {}


def test_pages_that_are_not_accepted() -> None:
    """Before 6.12 nothing marks them, and the counter is all that there is."""
    old = made(marks=frozenset(("mlocked",)), pages={("mlocked", 1, 2): 5})
    [row] = zone_free.zone_free_rows(old)
    assert row.found == {"free": 11, "isolated": -4, "unaccepted": 2}
    assert (row.status, row.found["unaccepted"]) == ("exact", 2)
    [row] = zone_free.zone_free_rows(made(pages={}))
    assert (row.status, row.difference) == ("differs", 2)
    reason = zone_zspages.CHECK.why_not_kept(old)
    assert reason == "this kernel does not mark pages of zsmalloc (before 6.11)"
    assert zone_zspages.CHECK.why_not_kept(made()) is None
    assert zone_mlock.CHECK.why_not_kept(old) is None
    unmarked = made(marks=frozenset(("zsmalloc",)))
    assert zone_mlock.CHECK.why_not_kept(unmarked) == "this kernel has no PG_mlocked"


def test_a_page_of_an_order_that_no_list_has() -> None:
    found = {(1, 2, 0): 3, (1, 2, 2): 1, (1, 2, 3): 1}
    assert off(zone_free_area.zone_free_area_rows(made(free=found))) == {
        "free_area[ZONE_NORMAL][2]": ("differs", 4),
        "free_area[ZONE_NORMAL][3]": ("differs", -8),
    }


def test_a_zone_that_was_not_read() -> None:
    taken = made(zones={})
    reason = "the zone is not in the image, or has no pages"
    for identity in IDENTITIES:
        rows = ROWS[identity](taken)
        assert rows and {(r.status, r.reason) for r in rows} == {("unverifiable", reason)}
    [row] = zone_free.zone_free_rows(taken)
    assert row.found == {"free": 0}


def test_a_zone_without_free_pages_has_no_row() -> None:
    stats = {item: NodeStat(0, 0) for item in STATS}
    full = ZONE._replace(stats=stats, free_blocks=(0, 0, 0), isolated=0)
    assert zone_free.zone_free_rows(made(full, free={}, pages={})) == []


def test_pages_that_are_missing() -> None:
    """They can be more free pages, but not fewer."""
    for amount, status in ((2, "unverifiable"), (0, "unverifiable"), (-2, "differs")):
        taken = made(with_stat("NR_FREE_PAGES", amount))
        taken = replace(taken, coverage={"pages": Coverage(1, 1)})
        [row] = zone_free.zone_free_rows(taken)
        assert row.status == status


def explained(identity: str, taken: Snapshot) -> dict[str, tuple[str, int | None]]:
    return off(mark_in_flight(taken, ROWS[identity](taken)))


def test_while_a_cpu_changes_the_lists() -> None:
    """It holds the lock. It may have taken a batch off the lists, and one block off its list."""
    item = "NR_FREE_PAGES[ZONE_NORMAL]"
    for amount, status in ((4096, "unverifiable"), (-4096, "unverifiable"), (4097, "differs")):
        zone = with_stat("NR_FREE_PAGES", amount, is_locked=True)
        assert explained("zone_free", made(zone)) == {item: (status, amount)}
    for blocks, status in ((3, "unverifiable"), (1, "unverifiable"), (4, "differs")):
        zone = ZONE._replace(free_blocks=(3, 0, blocks), is_locked=True)
        found = {"free_area[ZONE_NORMAL][2]": (status, 4 * (blocks - 2))}
        assert explained("zone_free_area", made(zone)) == found
    # What is not free memory is not changed with this lock.
    for identity, counter in (("zone_mlock", "NR_MLOCK"), ("zone_zspages", "NR_ZSPAGES")):
        zone = with_stat(counter, 1, is_locked=True)
        assert explained(identity, made(zone)) == {f"{counter}[ZONE_NORMAL]": ("differs", 1)}


def test_a_cpu_can_move_two_of_the_largest_blocks() -> None:
    """They are larger than a batch if pages are."""
    for amount, status in ((8192, "unverifiable"), (8193, "differs")):
        taken = made(with_stat("NR_FREE_PAGES", amount, is_locked=True))
        taken = replace(taken, limits=taken.limits._replace(block=4096))
        [row] = mark_in_flight(taken, zone_free.zone_free_rows(taken))
        assert (row.status, row.difference) == (status, amount)


def test_free_pages_of_another_zone_are_none_of_this_one() -> None:
    free = {(1, 2, 0): 3, (1, 2, 2): 2, (0, 2, 0): 9, (1, 1, 1): 5}
    rows = zone_free.zone_free_rows(made(free=free))
    [own] = [row for row in rows if (row.nid, row.item) == (1, "NR_FREE_PAGES[ZONE_NORMAL]")]
    assert (own.status, own.found["free"]) == ("exact", 11)
    assert own.claimed == {"vm_stat": 10, "cpu": -1}


def test_a_kernel_without_a_counter_keeps_no_identity_of_it() -> None:
    check = zone_mlock.CHECK
    assert check.why_not_kept(made(totals={"NR_FREE_PAGES": 10})) == (
        "this kernel does not keep NR_MLOCK"
    )
    assert check.why_not_kept(made(totals={})) == (
        "the counters of zones of this kernel are not known"
    )


def cpu(*functions: str) -> Running:
    return Running(0, 7, "sh", functions, True, ())


def test_a_row_is_about_a_zone_of_its_node() -> None:
    other_node, other_zone = ZONE._replace(nid=0), ZONE._replace(number=1)
    zones = {(0, 2): other_node, (1, 1): other_zone, (1, 2): ZONE}
    taken = made(zones=zones)
    found = {
        (row.nid, row.item): zone_of(taken.zones, row) for row in zone_free.zone_free_rows(taken)
    }
    assert found == {
        (0, "NR_FREE_PAGES[ZONE_NORMAL]"): other_node,
        (1, "NR_FREE_PAGES[ZONE_DMA32]"): other_zone,
        (1, "NR_FREE_PAGES[ZONE_NORMAL]"): ZONE,
    }


def test_a_kernel_whose_lock_does_not_tell() -> None:
    zone = with_stat("NR_FREE_PAGES", 4, is_locked=None)
    item = "NR_FREE_PAGES[ZONE_NORMAL]"
    assert explained("zone_free", made(zone)) == {item: ("differs", 4)}
    for functions, status in (
        (("rmqueue_bulk", "get_page_from_freelist", "do_syscall_64"), "unverifiable"),
        (("osq_lock", "mutex_lock", "do_syscall_64"), "differs"),
        (("osq_lock",), "unverifiable"),  # the rest of the stack is not known
    ):
        taken = made(zone, (cpu(*functions),))
        [row] = mark_in_flight(taken, zone_free.zone_free_rows(taken))
        unknown = "whether a CPU was changing the lists is not known"
        assert (row.item, row.status, row.difference) == (item, status, 4)
        assert row.reason == (unknown if status == "unverifiable" else None)


def test_isolated_blocks() -> None:
    zone = with_stat("NR_FREE_PAGES", 4, isolates=True)
    [row] = mark_in_flight(made(zone), zone_free.zone_free_rows(made(zone)))
    assert (row.status, row.reason) == ("unverifiable", "blocks of the zone are isolated")


def test_totals() -> None:
    totals = {item: stat.folded for item, stat in STATS.items()}
    rows = zone_totals.zone_total_rows(made(sums={**totals, "NR_ZSPAGES": 7}))
    [off_by] = [row for row in rows if row.item == "NR_ZSPAGES"]
    assert (off_by.found, off_by.claimed) == ({"zones": 7}, {"vm_zone_stat": 9})
    assert off(rows) == {"NR_ZSPAGES": ("differs", 2)}
    # Counters that are 0 on both sides have no row.
    assert {row.item for row in rows} == {item for item, total in totals.items() if total}


def zone_rows(report: Report, *identities: str) -> list[Row]:
    return [row for row in report.rows if row.identity in (identities or IDENTITIES)]


def of_zones(rows: list[Row]) -> Iterator[tuple[Row, tuple[int, str], tuple[str, ...]]]:
    """Yield rows with their zones and counters."""
    for row in rows:
        assert row.nid is not None
        name = row.item.partition("[")[2].partition("]")[0]
        yield row, (row.nid, name), counters_of(row.item)


def by_type(said: dict[tuple[int, str], T]) -> dict[tuple[int, str], T]:
    """Return what the guest says by enumerator of ``enum zone_type``."""
    return {(nid, f"ZONE_{name.upper()}"): value for (nid, name), value in said.items()}


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("workload", ["mlocked", "mixed"])
def test_zones_are_those_of_the_guest(lab: Lab, kernel: str, workload: str) -> None:
    """
    All counters that were the same before the guest was stopped and after it.

    What reads the guest's files takes memory of the node that it runs on. Node 2 has no CPU.
    """
    image = lab.image(kernel, "2cpu+1mem", workload)
    report = image.report()
    compared: set[str] = set()
    before, after = (by_type(zoneinfo(image, which)) for which in "23")
    for row, place, items in of_zones(zone_rows(report)):
        assert row.status == "exact"
        is_quiet = row.identity in ("zone_mlock", "zone_zspages") or row.nid == 2
        if row.identity == "zone_free_area" or not is_quiet:
            continue
        names = [item.lower() for item in items]
        told = [sum(zone[place][name] for name in names) for zone in (before, after)]
        found = sum(row.found.values())
        # CPUs add their changes within seconds, so they may have done so in between.
        if told[0] == told[1] and row.claimed is not None and not row.claimed["cpu"]:
            assert found == told[0], row
        if found and found in told:
            compared.add(row.identity)
    assert "zone_lru" in compared
    if workload == "mlocked":
        assert "zone_mlock" in compared
        mlocked = {row.nid for row in zone_rows(report, "zone_mlock") if row.found["mlocked"]}
        assert mlocked == {0, 1, 2}
    check_blocks(image, report)


def check_blocks(image: GuestImage, report: Report) -> None:
    before, after = (by_type(buddyinfo(image, which)) for which in "23")
    # A node with a CPU may have had other blocks in between.
    # Nobody takes memory from the lowest zone.
    quiet = {place for place in before if place[0] == 2 or place == (0, "ZONE_DMA")}
    same = {place for place in quiet if after[place] == before[place]}
    # The lab's kernels have no such zone (CONFIG_ZONE_DMA).
    assert (0, "ZONE_DMA") in same or (0, "ZONE_DMA") not in before
    for row, place, _ in of_zones(zone_rows(report, "zone_free")):
        if place in same:
            blocks = before[place]
            assert row.found["free"] == sum(n << order for order, n in enumerate(blocks))
    found = {place: [0] * len(before[place]) for place in same}
    for row, place, _ in of_zones(zone_rows(report, "zone_free_area")):
        if place in same:
            order = int(row.item.rpartition("[")[2].strip("]"))
            found[place][order] = row.found["free"] >> order
    assert found == {place: before[place] for place in same}


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("workload", "freeze"),
    [
        ("churn", "busy"),
        *(
            pytest.param(*sort, marks=pytest.mark.long)
            for sort in (
                *(("churn", "panic"), ("mlocking", "busy"), ("mlocking", "panic")),
                *(("zswapout", "busy"), ("zswapout", "panic")),
            )
        ),
    ],
)
def test_zones_under_load(lab: Lab, kernel: str, freeze: str, workload: str) -> None:
    report = lab.image(kernel, "4", workload, freeze=freeze, seed=1).report()
    rows = zone_rows(report, *IDENTITIES, "zone_totals")
    assert [row for row in rows if row.status == "differs"] == []
    locked = "a CPU was changing the lists of free pages"
    for row in rows:
        if row.identity in ("zone_free", "zone_free_area"):
            assert row.status in ("exact", "in-flight") or row.reason == locked, row


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_every_size_is_found(lab: Lab, kernel: str) -> None:
    subject = Subject(lab.image(kernel, "4", "mixed").program())
    kept = {i.name for i in subject.report.identities if i.status == "exact"}
    chosen = [name for name in ROWS if name in kept]
    assert set(ROWS) - set(chosen) == ({"zone_zspages"} if series(kernel) == "6.1" else set())
    for identity in chosen:
        for planter in planters_of(identity):
            for size in planter.sizes:
                fault = planter.plant(subject, size)
                found = subject.audit(fault)
                end = ended(subject.report, identity, fault, found)
                assert end.outcome == "found", (identity, size, end)
                assert [d.cause for d in found.diagnoses] == ["zone-counter"]


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in DEBIAN_KERNELS if k in ("6.1", "7.3")])
def test_the_lock_of_a_zone(lab: Lab, kernel: str) -> None:
    """A list that is one block short is no finding while the lock is held."""
    subject = Subject(lab.image(kernel, "4", "mixed").own_program())
    chosen = zone_in_use(subject, 1)
    zone = object_of(subject, chosen)
    overlay = Overlay(subject.prog)
    less = subject.add(zone.free_area[order_in_use(chosen, 1)].nr_free, -1)
    lock = subject.add(zone.lock.rlock.raw_lock.val.counter, 1)
    for writes, verdict in (
        ((less,), "findings"),
        ((less, lock), "incomplete"),
        ((lock,), "exact"),
    ):
        overlay.write(writes)
        report = audit(Image(subject.prog))
        overlay.clear()
        assert report.verdict == verdict
        reasons = [row.reason for row in report.rows if row.status == "unverifiable"]
        assert len(reasons) == (verdict == "incomplete")


@pytest.mark.image
@pytest.mark.parametrize("kernel", [k for k in DEBIAN_KERNELS if k in ("6.1", "7.3")])
def test_what_a_cpu_has_not_added_yet(lab: Lab, kernel: str) -> None:
    """It is part of the counter of a zone, and in no total."""
    subject = Subject(lab.image(kernel, "4", "mixed").own_program())
    chosen = zone_in_use(subject)
    stat = per_cpu_ptr(object_of(subject, chosen).per_cpu_zonestats, 1)
    write = subject.add(stat.vm_stat_diff[subject.prog["NR_MLOCK"]], -5)
    overlay = Overlay(subject.prog)
    overlay.write((write,))
    report = audit(Image(subject.prog))
    overlay.clear()
    [finding] = report.findings
    name = subject.snapshot.zones.name(chosen.number)
    told = (finding.identity, finding.nid, finding.item, finding.difference)
    assert told == ("zone_mlock", chosen.nid, f"NR_MLOCK[{name}]", -5)
    [diagnosis] = report.diagnoses
    assert diagnosis.cause == "zone-counter" and "a CPU's changes" in diagnosis.what
