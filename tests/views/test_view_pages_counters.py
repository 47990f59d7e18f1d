# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The counters that ``pages`` compares are those of the guest's /proc/zoneinfo, buddyinfo and vmstat,
are equal to what is found, and differ by what a test adds to them.
"""

from __future__ import annotations

import re
from collections import defaultdict

import drgn
import pytest
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from support.guest_files import COPIES
from support.guests import (
    DEBIAN_KERNELS,
    KERNELS,
    GuestImage,
    Lab,
    gigantic,
    series,
)
from support.planting import Overlay, Write
from support.views import number, rows
from support.zones import buddyinfo, zoneinfo

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.tables import Answer
from memcg_inspect.views.pages import pages

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


def compared(image: Image) -> Answer:
    return pages(image, ("kind",), counters=True)


def differing(answer: Answer) -> dict[tuple[object, ...], int]:
    """Return the differences by counter, node and zone."""
    return {
        (row["counter"], row["node"], row["zone"]): number(row, "difference")
        for row in rows(answer, 2)
        if row["difference"]
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("workload", ["mixed", "idle"])
def test_counters_at_rest(lab: Lab, kernel: str, workload: str) -> None:
    image = lab.image(kernel, "4", workload)
    answer = compared(image_of(image.program()))
    assert differing(answer) == {}
    assert answer.coverage["zones"].unreadable == 0
    said = {
        (row["node"], row["zone"], row["counter"]): number(row, "says") for row in rows(answer, 2)
    }
    zones = {(nid, zone) for nid, zone, _ in said if nid is not None}
    assert len(zones) >= 4
    assert all((*zone, "free_area") in said and (*zone, "NR_FREE_PAGES") in said for zone in zones)
    # CPUs add their changes to the totals within seconds.
    zspages = [nr_zspages(image, which) for which in ("2", "3")]
    found = {key[:2]: pages for key, pages in said.items() if key[2] == "NR_ZSPAGES"}
    assert found in zspages
    # zswap of Debian's older kernels needs a module that the guest does not load.
    has_zswap = workload == "mixed" and not kernel.startswith("6.")
    assert (sum(found.values()) > 500) == has_zswap
    # Before 6.11, there is no such counter.
    memmap = nr_memmap_pages(image)
    assert said.get((None, None, "nr_memmap_pages")) == memmap
    assert (memmap is None) == (series(kernel) == "6.1")


def nr_zspages(image: GuestImage, which: str) -> dict[tuple[int, str], int]:
    """Return ``nr_zspages`` of /proc/zoneinfo by node and zone, where it is not 0."""
    said = zoneinfo(image, which)
    return {place: n for place, counters in said.items() if (n := counters.get("nr_zspages", 0))}


def nr_memmap_pages(image: GuestImage) -> int | None:
    """Return the sum of the counters of /proc/vmstat."""
    text = (image.guest / "2/proc/vmstat").read_text()
    found = re.findall(r"^nr_memmap_(?:boot_)?pages (\d+)$", text, re.M)
    return sum(map(int, found)) if found else None


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("workload", ["mixed", "idle"])
def test_free_blocks_are_those_of_buddyinfo(lab: Lab, kernel: str, workload: str) -> None:
    """The file prints ``nr_free`` of all zones, and that of a zone at rest is what it said."""
    image = lab.image(kernel, "4", workload)
    prog = image.program()
    found: dict[tuple[object, object], list[int]] = defaultdict(lambda: [0] * 11)
    for row in rows(pages(image_of(prog), ("node", "zone", "kind", "order"))):
        if row["kind"] == "free":
            order = number(row, "order")
            found[row["node"], row["zone"]][order] += number(row, "pages") >> order
    counted = {
        (node.node_id.value_(), zone.name.string_().decode()): [
            area.nr_free.value_() for area in zone.free_area
        ]
        for node in for_each_online_pgdat(prog)
        for zone in node.node_zones
        if zone.present_pages
    }
    assert {zone: found[zone] for zone in counted} == counted
    for which in COPIES:
        said = buddyinfo(image, which)
        assert set(said) == set(counted)
        # Nobody takes memory from the lowest zone. The copies themselves take some from others.
        for zone, blocks in said.items():
            assert zone[1] != "DMA" or blocks == counted[zone]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("freeze", ["busy", pytest.param("panic", marks=pytest.mark.long)])
def test_counters_under_load(lab: Lab, kernel: str, freeze: str) -> None:
    """Free pages differ only while a CPU changes their lists."""
    image = lab.image(kernel, "4", "churn", freeze=freeze, seed=1)
    answer = compared(image_of(image.program()))
    for row in rows(answer, 2):
        assert not row["difference"] or "changing the lists" in str(row["note"]), row


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_counters_that_are_wrong(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4", "mixed").own_program()
    zone = next(z for z in prog["node_data"][2].node_zones if z.present_pages)
    name = zone.name.string_().decode()
    overlay, stat = Overlay(prog), zone.vm_stat
    items = {item: stat[prog[item]].counter for item in ("NR_FREE_PAGES", "NR_ZSPAGES")}
    for item, counter in items.items():
        overlay.write((added(counter, 5),))
        assert differing(compared(Image(prog))) == {(item, 2, name): 5}
        overlay.clear()
    # One block of an order too little, and as much in blocks of order 3 too much: the sum is right.
    order = next(order for order in range(4, 11) if zone.free_area[order].nr_free)
    orders = [zone.free_area[number].nr_free for number in (3, order)]
    overlay.write((added(orders[0], 1 << order - 3), added(orders[1], -1)))
    answer = compared(Image(prog))
    assert differing(answer) == {
        ("free_area[3]", 2, name): 1 << order,
        (f"free_area[{order}]", 2, name): -1 << order,
    }
    whats = [example.what for example in answer.coverage["zones"].examples]
    assert whats == [f"counter free_area[{n}] of zone {name} of node 2" for n in (3, order)]
    overlay.clear()
    # With its lock held, the same is no difference to tell.
    lock = zone.lock.rlock.raw_lock.val.counter
    overlay.write((added(orders[0], 2), added(lock, 1)))
    answer = compared(Image(prog))
    assert set(differing(answer)) == {("free_area", 2, name), ("free_area[3]", 2, name)}
    assert answer.coverage["zones"].unreadable == 0


@pytest.mark.parametrize("kernel", [k for k in DEBIAN_KERNELS if k == "7.3"])
def test_memory_map_that_is_not_all_counted(lab: Lab, kernel: str) -> None:
    """The pages that stand for the tails of huge pages are found, and the kernel does not count."""
    image = gigantic(lab, kernel)
    prog = image.program()
    tails = sum(
        bool(page)
        for zone in prog["node_data"][0].node_zones
        if zone.present_pages
        for page in zone.vmemmap_tails
    )
    answer = compared(image_of(prog))
    assert differing(answer) == {("nr_memmap_pages", None, None): -tails}
    assert tails > 0
    assert answer.coverage["zones"].unreadable == 0


def added(thing: drgn.Object, amount: int) -> Write:
    """Return what adds to an integer."""
    assert thing.address_ is not None
    size = drgn.sizeof(thing)
    value = (thing.value_() + amount) % (1 << 8 * size)
    return Write(thing.address_, value.to_bytes(size, "little"))
