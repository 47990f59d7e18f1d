# SPDX-License-Identifier: LGPL-2.1-or-later
"""Lines of memory.stat, from a table made as that of mm/memcontrol.c."""

from __future__ import annotations

import pytest
from drgn import FaultError
from support.layouts import MadeImage

from memcg_inspect.linux.mm.memcontrol_stat import StatLine, accounts_hugetlb, stat_lines
from memcg_inspect.linux.mm.memcontrol_vmstats import event_slots

VARIABLES, NAMES = 0xFFFFFFFF82000000, 0xFFFF888030000000
NODE_ITEMS = (
    *("NR_FILE_PAGES", "NR_KERNEL_STACK_KB", "NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B"),
    *("WORKINGSET_REFAULT_ANON", "PGDEMOTE_KSWAPD", "PGSCAN_DIRECT", "PGREFILL", "NR_HUGETLB"),
)
MEMCG_ITEMS = ("MEMCG_SWAP", "MEMCG_PERCPU_B", "MEMCG_ZSWAPPED")
ITEMS = (*NODE_ITEMS, *MEMCG_ITEMS)
#: ``CGRP_ROOT_MEMORY_HUGETLB_ACCOUNTING``
HUGETLB = 1 << 5


def kernel(*table: tuple[str, int], has_flag: bool = True, flags: int = 0) -> MadeImage:
    """Return a kernel whose ``memory_stats`` has these names and items."""
    image = MadeImage()
    image.declare(
        """
        struct memory_stat { char *name; unsigned int idx; };
        struct cgroup_root { unsigned int flags; };
        """
    )
    image.enum("node_stat_item", **{n: i for i, n in enumerate(NODE_ITEMS)},
               NR_VM_NODE_STAT_ITEMS=len(NODE_ITEMS))  # fmt: skip
    image.enum("memcg_stat_item", **{n: i for i, n in enumerate(MEMCG_ITEMS, len(NODE_ITEMS))})
    image.variable("memory_stats", f"struct memory_stat[{len(table)}]", VARIABLES)
    for n, (name, item) in enumerate(table):
        image.write(NAMES + 64 * n, name.encode() + b"\0")
        image.make("struct memory_stat", VARIABLES + 16 * n, {"name": NAMES + 64 * n, "idx": item})
    image.variable("cgrp_dfl_root", "struct cgroup_root", VARIABLES + 2048)
    image.make("struct cgroup_root", VARIABLES + 2048, {"flags": flags})
    if has_flag:
        image.enum(None, CGRP_ROOT_MEMORY_HUGETLB_ACCOUNTING=HUGETLB)
    events = ("PGPGIN", "PGPGOUT", "PGSCAN_KSWAPD", "PGSTEAL_DIRECT", "NUMA_PAGE_MIGRATE")
    image.given[event_slots] = {event: slot for slot, event in enumerate(events)}
    return image


def lines(image: MadeImage) -> dict[str, StatLine]:
    return {line.name: line for line in stat_lines(image)}


def test_units_of_items() -> None:
    """memcg_page_state_output_unit(): pages become bytes, and events stay what they are."""
    found = lines(kernel(*[(item.lower(), number) for number, item in enumerate(ITEMS)]))
    shown = {name: (line.unit, line.scale, line.by_node) for name, line in found.items()}
    assert {name: shown[name.lower()] for name in ITEMS} == {
        "NR_FILE_PAGES": ("bytes", 4096, True),
        "NR_KERNEL_STACK_KB": ("bytes", 1024, True),
        "NR_SLAB_RECLAIMABLE_B": ("bytes", 1, True),
        "NR_SLAB_UNRECLAIMABLE_B": ("bytes", 1, True),
        "WORKINGSET_REFAULT_ANON": ("events", 1, True),
        "PGDEMOTE_KSWAPD": ("events", 1, True),
        "PGSCAN_DIRECT": ("events", 1, True),
        "PGREFILL": ("events", 1, True),
        "NR_HUGETLB": ("bytes", 4096, True),
        "MEMCG_SWAP": ("bytes", 4096, False),
        "MEMCG_PERCPU_B": ("bytes", 1, False),
        "MEMCG_ZSWAPPED": ("bytes", 4096, False),
    }
    assert found["pgrefill"].items == ("PGREFILL",)
    assert [name for name, line in found.items() if not line.in_stat] == ["nr_hugetlb"]


def test_lines_that_no_table_has() -> None:
    """memcg_stat_format() adds sums, and events; pgpgin and pgpgout are on cgroup v1 only."""
    image = kernel(("file", 0), ("slab_unreclaimable", 3), ("swap", 9))
    found = list(stat_lines(image))
    assert [line.name for line in found] == [
        *("file", "slab_unreclaimable", "slab", "swap", "pgscan", "pgsteal"),
        *("pgscan_kswapd", "pgsteal_direct", "numa_pages_migrated"),
    ]
    slab, by_all = found[2], {line.name: line for line in found[4:]}
    assert slab == StatLine(
        "slab", ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B"), "bytes", 1, False
    )
    # Items and events that the kernel counts, whichever they are.
    assert by_all["pgscan"].items == ("PGSCAN_KSWAPD", "PGSCAN_DIRECT")
    assert by_all["pgsteal"].items == ("PGSTEAL_DIRECT",)
    assert by_all["numa_pages_migrated"].items == ("NUMA_PAGE_MIGRATE",)
    units = {(line.unit, line.scale, line.by_node) for line in by_all.values()}
    assert units == {("events", 1, False)}


@pytest.mark.parametrize("event", ["PGSCAN", "PGSTEAL"])
def test_who_reclaims(event: str) -> None:
    """One line has the sum. Anonymous pages and those of files are the same pages again."""
    image, by = kernel(("file", 0)), ("KHUGEPAGED", "PROACTIVE", "DIRECT", "KSWAPD", "ANON")
    image.given[event_slots] = {f"{event}_{one}": slot for slot, one in enumerate(by)}
    found = lines(image)
    order = ("KSWAPD", "DIRECT", "PROACTIVE", "KHUGEPAGED")
    extra = ("PGSCAN_DIRECT",) if event == "PGSTEAL" else ()  # an item of nodes
    other = "pgsteal" if event == "PGSCAN" else "pgscan"
    assert found[event.lower()].items == tuple(f"{event}_{one}" for one in order)
    assert found[other].items == extra
    assert [name for name in found if name.startswith(f"{event.lower()}_")] == [
        f"{event.lower()}_{one.lower()}" for one in by
    ]


def test_a_name_that_is_no_text() -> None:
    """The image is damaged. The bytes are escaped."""
    image = kernel(("file", 0))
    image.write(NAMES, b"fil\xe9\0")
    assert list(lines(image))[0] == "fil\\xe9"


@pytest.mark.parametrize(
    ("has_flag", "flags", "accounts"),
    [(True, HUGETLB, True), (True, HUGETLB | 1, True), (True, 1, False), (False, 0, True)],
)
def test_huge_pages_of_hugetlb(has_flag: bool, flags: int, accounts: bool) -> None:
    """Up to 6.6 no flag tells it. memory.numa_stat has the line in any case."""
    image = kernel(("file", 0), ("hugetlb", 8), has_flag=has_flag, flags=flags)
    assert accounts_hugetlb(image) is accounts
    found = lines(image)
    assert (found["hugetlb"].in_stat, found["hugetlb"].by_node) == (accounts, True)
    assert found["file"].in_stat


def test_an_item_that_no_kernel_has() -> None:
    """The table is damaged."""
    with pytest.raises(FaultError, match="unknown item 77") as raised:
        stat_lines(kernel(("file", 77)))
    assert raised.value.address == VARIABLES
