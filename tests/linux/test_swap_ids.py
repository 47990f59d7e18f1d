# SPDX-License-Identifier: LGPL-2.1-or-later
"""
IDs of memcgs of swap entries, in memory made by hand as in mm/swap_cgroup.c and mm/swap_table.h.

``tests/linux/test_layouts_counters.py`` has the layouts of more releases.
"""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.layouts import FRAMES, MadeImage

from memcg_inspect.linux.mm import swap_cgroup
from memcg_inspect.linux.mm.swap_cgroup import swap_cgroup_pages, swap_ids
from memcg_inspect.model import Coverage

VARIABLES, INFO = 0xFFFFFFFF82000000, 0xFFFF888030000000
MAPS = tuple(0xFFFF888031000000 + 0x100000 * n for n in range(3))
MISSING, PAGE = 0xFFFF888077700000, 4096
#: The pages of IDs, up to 6.13.
PAGES = tuple(FRAMES.page(pfn) for pfn in (5, 9, 6))

AREA = "struct swap_info_struct { unsigned long flags; unsigned int max; void *cluster_info; };"
CONTROLS = {
    "6.13": "struct swap_cgroup_ctrl { struct page **map; unsigned long length; };",
    "6.14": """
        struct swap_cgroup { int ids; };
        struct swap_cgroup_ctrl { struct swap_cgroup *map; };
    """,
    "7.2": """
        struct swap_memcg_table { unsigned short id[512]; };
        struct swap_cluster_info { unsigned int count; struct swap_memcg_table *memcg_table; };
    """,
}


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the arrays whose length is checked; those in missing memory have no room."""
    found: list[tuple[int, int]] = []

    def check_room(image: MadeImage, address: int, size: int) -> None:
        found.append((address, size))
        if address == MISSING:
            raise FaultError("no room", address)

    monkeypatch.setattr(swap_cgroup, "check_room", check_room)
    return found


def kernel(release: str, *sizes: int) -> MadeImage:
    """
    Return a kernel with three swap areas.

    :param sizes: number of entries of each
    """
    image = MadeImage()
    image.declare(AREA + CONTROLS[release])
    image.enum("swap_flags", SWP_USED=1, SWP_WRITEOK=2)
    image.variable("swap_info", "struct swap_info_struct *[3]", VARIABLES + 64)
    image.variable("nr_swapfiles", "unsigned int", VARIABLES + 128)
    image.words(VARIABLES + 128, len(sizes))
    for number, size in enumerate(sizes):
        image.words(VARIABLES + 64 + 8 * number, INFO + 64 * number)
        members = {"max": size, "cluster_info": MAPS[number] if release == "7.2" else 0}
        image.make("struct swap_info_struct", INFO + 64 * number, members)
    if release != "7.2":
        image.variable("swap_cgroup_ctrl", "struct swap_cgroup_ctrl[3]", VARIABLES)
    return image


def put(image: MadeImage, address: int, number: int, memcg: int) -> None:
    """Write the ID of an entry."""
    image.write(address + 2 * number, memcg.to_bytes(2, "little"))


def read(image: MadeImage) -> tuple[dict[int, int], int, list[tuple[str, int, str]]]:
    coverage = Coverage()
    found = swap_ids(image, coverage)
    missed = [(one.what, one.address, one.reason) for one in coverage.examples]
    assert coverage.unreadable == len(missed)
    return dict(found), coverage.read, missed


def miss(address: int, why: str) -> tuple[str, int, str]:
    return ("memcgs of swap entries", address, f"{why}: {address:#x}")


def test_one_array_of_ids(rooms: list[tuple[int, int]]) -> None:
    """Since 6.14. The first area has 3,000 entries, the second none, and the third ends early."""
    image = kernel("6.14", 3000, 70, 70)
    image.words(VARIABLES, MAPS[0], 0, MAPS[2])
    for number, memcg in ((0, 7), (2047, 0x321), (2048, 7), (2999, 5), (3000, 9)):
        put(image, MAPS[0], number, memcg)
    put(image, MAPS[2], 69, 8)
    put(image, MAPS[2], 70, 9)
    assert read(image) == ({7: 2, 0x321: 1, 5: 1, 8: 1}, 3, [])
    assert rooms == [(MAPS[0], 6000), (MAPS[2], 140)]


def test_an_array_of_an_area_that_is_not_known(rooms: list[tuple[int, int]]) -> None:
    image = kernel("6.14", 3000)
    image.words(VARIABLES, 0, MAPS[1])
    put(image, MAPS[1], 0, 7)
    assert read(image) == ({}, 0, [])
    assert rooms == []


def test_ids_that_are_not_in_the_image(rooms: list[tuple[int, int]]) -> None:
    image = kernel("6.14", 5000, 100, 100)
    image.words(VARIABLES, MAPS[0], MISSING, MAPS[2])
    put(image, MAPS[0], 0, 7)
    put(image, MAPS[0], 4999, 7)
    put(image, MAPS[2], 0, 7)
    # Other pages and other areas are read.
    expected = [miss(MAPS[0] + PAGE, "not made"), miss(MISSING, "no room")]
    assert read(image) == ({7: 3}, 3, expected)


def test_more_areas_than_the_kernel_can_have(rooms: list[tuple[int, int]]) -> None:
    image = kernel("6.14", 10, 10, 10)
    image.words(VARIABLES + 128, 70)
    image.words(VARIABLES, 0, 0, MAPS[2])
    put(image, MAPS[2], 9, 7)
    assert read(image) == ({7: 1}, 1, [])


@pytest.mark.parametrize("name", ["swap_cgroup_ctrl", "swap_info", "nr_swapfiles"])
def test_variables_that_are_not_in_the_image(rooms: list[tuple[int, int]], name: str) -> None:
    image = kernel("6.14", 10)
    image.words(VARIABLES, MAPS[0])
    put(image, MAPS[0], 0, 7)
    types = {"nr_swapfiles": "unsigned int", "swap_info": "struct swap_info_struct *[3]"}
    image.variable(name, types.get(name, "struct swap_cgroup_ctrl[3]"), MISSING)
    assert read(image) == ({}, 0, [miss(MISSING, "not made")])


@pytest.mark.parametrize("release", CONTROLS)
def test_kernels_without_swap(release: str, rooms: list[tuple[int, int]]) -> None:
    image, coverage = MadeImage(), Coverage()
    image.declare(AREA + CONTROLS[release])
    assert read(image) == ({}, 0, [])
    assert list(swap_cgroup_pages(image, coverage)) == []
    assert coverage == Coverage()


def test_pages_of_ids(rooms: list[tuple[int, int]]) -> None:
    """Up to 6.13, an array has the pages. Some are not allocated yet."""
    image = kernel("6.13", 10, 10, 10)
    image.words(VARIABLES, MAPS[0], 3, 0, 0, MAPS[2], 1)
    image.words(MAPS[0], PAGES[0], 0, PAGES[1], PAGES[2])
    image.words(MAPS[2], PAGES[2])
    virt = [FRAMES.virt(page) for page in PAGES]
    for place in virt:
        put(image, place, 0, 7)
        put(image, place, 2047, 8)
        put(image, place, 2048, 0)
    put(image, virt[0], 5, 9)
    assert read(image) == ({7: 3, 8: 3, 9: 1}, 3, [])
    assert rooms == [(MAPS[0], 24), (MAPS[2], 8)]
    coverage = Coverage()
    assert list(swap_cgroup_pages(image, coverage)) == list(PAGES)
    assert coverage.unreadable == 0


def test_pages_of_ids_that_are_not_in_the_image(rooms: list[tuple[int, int]]) -> None:
    image = kernel("6.13", 10, 10, 10)
    image.words(VARIABLES, MAPS[0], 2, MAPS[1], 2, MISSING, 1)
    image.words(MAPS[0], PAGES[0], PAGES[1])
    put(image, FRAMES.virt(PAGES[0]), 0, 7)
    image.forget(FRAMES.virt(PAGES[0]))
    put(image, FRAMES.virt(PAGES[1]), 0, 8)
    found, number, missed = read(image)
    assert (found, number) == ({8: 1}, 1)
    assert missed == [
        miss(FRAMES.virt(PAGES[0]), "not made"),
        miss(MAPS[1], "not in the image"),
        miss(MISSING, "no room"),
    ]
    coverage = Coverage()
    assert list(swap_cgroup_pages(image, coverage)) == list(PAGES[:2])
    missed = [(one.what, one.address, one.reason) for one in coverage.examples]
    assert missed == [miss(MAPS[1], "not in the image"), miss(MISSING, "no room")]


def test_tables_of_clusters(rooms: list[tuple[int, int]]) -> None:
    """Since 7.2, each cluster of 512 entries has a table of its own. The last one is cut off."""
    image, tables = kernel("7.2", 1025, 512, 512), [INFO + PAGE * n for n in range(1, 5)]
    for number, table in enumerate(tables):
        image.write(table, bytes(2048))
        put(image, table, 0, 7 + number)
        put(image, table, 511, 7)
        put(image, table, 512, 99)
    image.words(MAPS[0], 0, tables[0], 0, 0, 0, tables[1], 0, tables[3])
    image.words(MAPS[1], 0, tables[2])
    image.words(INFO + 64 * 2 + 16, 0)  # swapoff
    assert read(image) == ({7: 4, 8: 1, 9: 1}, 3, [])
    assert rooms == [(MAPS[0], 48), (MAPS[1], 16)]


def test_tables_of_clusters_that_are_not_in_the_image(rooms: list[tuple[int, int]]) -> None:
    """One table, a page of clusters, and all clusters of an area: others are read."""
    image, table = kernel("7.2", 512 * 300, 512, 512), INFO + PAGE
    put(image, table, 0, 7)
    put(image, table, 1023, 0)
    image.words(MAPS[0] + PAGE, 0, table, 0, MISSING)
    image.words(INFO + 64 + 16, MISSING)
    image.words(MAPS[2], 0, table)
    found, number, missed = read(image)
    assert (found, number) == ({7: 2}, 2)
    assert missed == [
        miss(MAPS[0], "not in the image"),
        miss(MISSING, "no room"),
        miss(MISSING, "not made"),
    ]


def in_use(image: MadeImage) -> None:
    """Let all areas be in use: they have all arrays of IDs then."""
    for number in range(3):
        image.words(INFO + 64 * number, 3)


def null(pointer: str, address: int) -> tuple[str, int, str]:
    return miss(address, f"{pointer} of a swap area in use is NULL")


@pytest.mark.parametrize("release", ["6.13", "6.14"])
def test_maps_that_are_missing(rooms: list[tuple[int, int]], release: str) -> None:
    image = kernel(release, 10, 10, 10)
    assert read(image) == ({}, 0, [])  # swapoff
    in_use(image)
    missed = [null("swap_cgroup_ctrl.map", INFO + 64 * number) for number in range(3)]
    assert read(image) == ({}, 0, missed)


def test_a_page_of_ids_that_is_missing(rooms: list[tuple[int, int]]) -> None:
    image = kernel("6.13", 10)
    image.words(VARIABLES, MAPS[0], 3)
    image.words(MAPS[0], 0, PAGES[1], 0)
    image.write(FRAMES.virt(PAGES[1]), bytes(PAGE))
    assert read(image) == ({}, 1, [])  # swapon() has not allocated them yet
    in_use(image)
    missed = [null("a page of swap_cgroup_ctrl.map", MAPS[0] + at) for at in (0, 16)]
    assert read(image) == ({}, 1, missed)


def test_tables_of_clusters_that_are_missing(rooms: list[tuple[int, int]]) -> None:
    """A cluster without entries has none."""
    image = kernel("7.2", 512 * 3, 512)
    image.words(MAPS[0], 0, 0, 5, 0, 1 << 31, 0)
    image.words(INFO + 64 + 16, 0)
    assert read(image) == ({}, 0, [])  # swapoff, or a swapon() that failed
    in_use(image)
    table = "memcg_table of a cluster with entries"
    missed = [null("cluster_info", INFO + 64), null(table, MAPS[0] + 16), null(table, MAPS[0] + 32)]
    assert read(image) == ({}, 0, missed)


def test_ids_of_a_machine_with_the_other_byte_order(
    rooms: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = kernel("6.14", 10)
    image.words(VARIABLES, MAPS[0])
    put(image, MAPS[0], 3, 0x0102)
    assert read(image)[0] == {0x0102: 1}
    monkeypatch.setattr(swap_cgroup, "_NATIVE", "big")
    assert read(image)[0] == {0x0201: 1}
