# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters, stocks, swap and rings of io_uring in releases that the lab does not boot.

Each layout follows the file of the release that the test names.
"""

from __future__ import annotations

import pytest
from support.layouts import FRAMES, MadeImage

from memcg_inspect.linux.io_uring.io_uring import io_uring_pages
from memcg_inspect.linux.mm import swap_cgroup
from memcg_inspect.linux.mm.memcontrol_stock import (
    charge_stock_bound,
    read_charge_stocks,
    read_obj_stocks,
)
from memcg_inspect.linux.mm.memcontrol_vmstats import lruvec_items, memcg_items, stat_index
from memcg_inspect.linux.mm.percpu import PcpuChunk, PercpuReader
from memcg_inspect.linux.mm.swap_cgroup import swap_ids
from memcg_inspect.model import ChargeStock, Coverage, ObjStock

VARIABLES, DATA = 0xFFFFFFFF82000000, 0xFFFF888030000000
OBJCG, MEMCG, PGDAT = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888000333000
LISTS = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct hlist_node { struct hlist_node *next; struct hlist_node **pprev; };
    struct hlist_head { struct hlist_node *first; };
    struct xarray { unsigned int lock; unsigned int flags; void *xa_head; };
    struct xa_node { void *head[5]; void *slots[64]; };
"""

#: The stocks of mm/memcontrol.c.
OLD_STOCK = """
    struct memcg_stock_pcp {
        struct mem_cgroup *cached; unsigned int nr_pages;
        struct obj_cgroup *cached_objcg; struct pglist_data *cached_pgdat; unsigned int nr_bytes;
        int nr_slab_reclaimable_b; int nr_slab_unreclaimable_b;
    };
"""
NEW_STOCKS = """
    struct memcg_stock_pcp {
        struct lock lock; unsigned char nr_pages[7]; struct mem_cgroup *cached[7];
    };
    struct obj_stock_pcp {
        struct lock lock; unsigned int nr_bytes; struct obj_cgroup *cached_objcg;
        struct pglist_data *cached_pgdat; int nr_slab_reclaimable_b; int nr_slab_unreclaimable_b;
    };
"""


@pytest.mark.parametrize("release", ["6.2", "6.14", "6.18", "7.1"])
def test_stocks(release: str) -> None:
    """Up to 6.15 there is one stock. 6.16 to 7.1 have two; that of objects has one slot."""
    image = MadeImage()
    image.declare("struct pglist_data { int node_id; }; struct lock { unsigned char acquired; };")
    is_old = release in ("6.2", "6.14")
    image.declare(OLD_STOCK if is_old else NEW_STOCKS)
    image.variable("__per_cpu_offset", "unsigned long[2]", VARIABLES)
    image.words(VARIABLES, DATA, DATA + 0x100000)
    image.make("struct pglist_data", PGDAT, {"node_id": 1})
    image.variable("memcg_stock", "struct memcg_stock_pcp", 0x10000)
    name, at = ("memcg_stock_pcp", 0x10000) if is_old else ("obj_stock_pcp", 0x20000)
    if not is_old:
        image.variable("obj_stock", "struct obj_stock_pcp", at)
    objects = {
        "cached_objcg": OBJCG,
        "cached_pgdat": PGDAT,
        "nr_bytes": 70000,
        "nr_slab_reclaimable_b": 200,
        "nr_slab_unreclaimable_b": (1 << 32) - 300,
    }
    pages = {"cached": MEMCG, "nr_pages": 63} if is_old else {}
    for offset, filled in ((DATA, True), (DATA + 0x100000, False)):
        image.make("struct memcg_stock_pcp", offset + 0x10000, {})
        image.make(f"struct {name}", offset + at, objects | pages if filled else {})
    expected = [ChargeStock(0, MEMCG, 63, 0)]
    if not is_old:  # the third slot
        image.write(DATA + 0x10000 + 1 + 2, b"\x07")
        image.words(DATA + 0x10000 + 8 + 2 * 8, MEMCG)
        expected = [ChargeStock(0, MEMCG, 7, 2)]
    coverage = Coverage()
    locked = None if is_old else False
    assert read_obj_stocks(image, coverage) == [ObjStock(0, 0, OBJCG, 70000, 1, 200, -300, locked)]
    assert read_charge_stocks(image, coverage) == expected
    assert not coverage.unreadable
    assert charge_stock_bound(image).slots == (1 if is_old else 7)


#: Items of include/linux/mmzone.h and memcontrol.h, some of them.
NODE_ITEMS = {
    "NR_SLAB_RECLAIMABLE_B": 0,
    "NR_SLAB_UNRECLAIMABLE_B": 1,
    "NR_DIRTIED": 2,
    "NR_PAGETABLE": 3,
    "PGPROMOTE_SUCCESS": 4,
    "PGDEMOTE_KSWAPD": 5,
    "PGDEMOTE_DIRECT": 6,
    "PGDEMOTE_KHUGEPAGED": 7,
    "NR_VM_NODE_STAT_ITEMS": 8,
}
MEMCG_ITEMS = {"MEMCG_SWAP": 8, "MEMCG_SOCK": 9, "MEMCG_KMEM": 10, "MEMCG_NR_STAT": 11}


def kernel_with_items() -> MadeImage:
    image = MadeImage()
    image.enum("node_stat_item", **NODE_ITEMS)
    image.enum("memcg_stat_item", **MEMCG_ITEMS)
    return image


def test_items_without_an_index() -> None:
    """Up to 6.9 lruvecs have an element for each item, and do not count what only nodes count."""
    image = kernel_with_items()
    assert stat_index(image) is None
    slab = ("NR_SLAB_RECLAIMABLE_B", "NR_SLAB_UNRECLAIMABLE_B")
    assert lruvec_items(image) == (*slab, "NR_PAGETABLE")
    assert memcg_items(image) == ("MEMCG_SWAP", "MEMCG_SOCK", "MEMCG_KMEM")


@pytest.mark.parametrize(
    ("release", "element", "table"),
    [
        ("6.10", "signed char", [1, 2, 0, 3, 0, 0, 0, 0, 4, 5, 6]),
        ("6.11", "signed char", [1, 2, 0, 3, 0, 0, 0, 0, 4, 5, 6]),
        ("6.13", "unsigned char", [0, 1, 255, 2, 255, 255, 255, 255, 3, 4, 5]),
    ],
)
def test_index_of_items(release: str, element: str, table: list[int]) -> None:
    """``mem_cgroup_stats_index`` is signed in 6.10 and 6.11, and holds the index plus 1."""
    image = kernel_with_items()
    image.declare("struct memcg_vmstats { long state[6]; };")
    image.variable("mem_cgroup_stats_index", f"{element}[{len(table)}]", VARIABLES)
    image.write(VARIABLES, bytes(table))
    assert stat_index(image) == {0: 0, 1: 1, 3: 2, 8: 3, 9: 4, 10: 5}
    assert lruvec_items(image)[-1] == "NR_PAGETABLE"
    assert len(memcg_items(image)) == 3


SWAP = """
    struct swap_info_struct { unsigned long flags; unsigned int max; };
    struct swap_cgroup_ctrl { %s };
"""


@pytest.mark.parametrize("release", ["6.13", "6.14", "7.1"])
def test_memcgs_of_swap_entries(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mm/swap_cgroup.c: pages of IDs up to 6.13, then one array of IDs, two in each word."""
    # This image has no page allocator.
    monkeypatch.setattr(swap_cgroup, "check_room", lambda *_: None)
    image = MadeImage()
    if release == "6.13":
        image.declare(SWAP % "struct page **map; unsigned long length; unsigned int lock;")
    else:
        image.declare("struct swap_cgroup { int ids; };" + SWAP % "struct swap_cgroup *map;")
    image.variable("swap_cgroup_ctrl", "struct swap_cgroup_ctrl[2]", VARIABLES)
    image.variable("swap_info", "struct swap_info_struct *[2]", VARIABLES + 64)
    image.variable("nr_swapfiles", "unsigned int", VARIABLES + 128)
    image.write(VARIABLES, bytes(256))
    image.words(VARIABLES + 64, DATA)
    image.words(VARIABLES + 128, 1)
    image.make("struct swap_info_struct", DATA, {"max": 3000})
    if release == "6.13":
        image.words(VARIABLES, DATA + 4096, 2)
        image.words(DATA + 4096, FRAMES.page(5), FRAMES.page(9))
        pages = [FRAMES.virt(FRAMES.page(5)), FRAMES.virt(FRAMES.page(9))]
    else:
        image.words(VARIABLES, DATA + 4096)
        pages = [DATA + 4096, DATA + 8192]
    for page in pages:
        image.write(page, bytes(4096))
    image.write(pages[0] + 2 * 7, b"\x21\x03\x21\x03")
    image.write(pages[1] + 2 * 900, b"\x05\x00")
    coverage = Coverage()
    assert swap_ids(image, coverage) == {0x321: 2, 5: 1}
    assert (coverage.read, coverage.unreadable) == (2, 0)


#: include/linux/io_uring_types.h, and the rings of buffers of io_uring/kbuf.h.
RINGS = "struct io_rings *rings; struct io_uring_sqe *sq_sqes;"
ARRAYS = "struct page **ring_pages; struct page **sqe_pages;"
PINNED = """
    struct io_buffer_list {
        struct page **buf_pages; struct io_uring_buf_ring *buf_ring; unsigned short buf_nr_pages;
        %s
    };
"""
MAPPED = "unsigned char is_mmap;"
REGION = "struct io_mapped_region { struct page **pages; void *ptr; unsigned int nr_pages; };"
OF_REGIONS = """
    struct io_buffer_list { struct io_uring_buf_ring *buf_ring; unsigned short buf_nr_pages;
                            struct io_mapped_region region; };
"""
CONTEXTS = {
    "6.2": (PINNED % "", f"{RINGS} struct io_buffer_list *io_bl;"),
    "6.4": (PINNED % MAPPED, f"{RINGS} struct io_buffer_list *io_bl;"),
    "6.5": (PINNED % MAPPED, f"{RINGS} {ARRAYS} struct io_buffer_list *io_bl;"),
    "6.8": (
        PINNED % MAPPED,
        f"{RINGS} {ARRAYS} struct io_buffer_list *io_bl; struct hlist_head io_buf_list;",
    ),
    "6.9": (PINNED % MAPPED, f"{RINGS} {ARRAYS} struct hlist_head io_buf_list;"),
    "6.10": (PINNED % MAPPED, f"{RINGS} {ARRAYS}"),
    "6.13": (
        REGION + PINNED % "unsigned short flags;",
        f"{RINGS} {ARRAYS} struct io_mapped_region param_region;",
    ),
    "6.14": (
        REGION + OF_REGIONS,
        f"{RINGS} struct io_mapped_region sq_region; struct io_mapped_region ring_region;"
        " struct io_mapped_region param_region;",
    ),
}


@pytest.mark.parametrize("release", CONTEXTS)
def test_rings_of_io_uring(release: str) -> None:
    """
    The kernel allocates rings in page frames 1 and 2, and rings of buffers in 3 and 4.

    The ring in frame 4 was unregistered: 6.6 to 6.9 keep it.
    """
    minor = int(release.split(".")[1])
    image, (buffers, context) = MadeImage(), CONTEXTS[release]
    image.declare(LISTS + buffers)
    image.declare(f"struct io_ring_ctx {{ {context} struct xarray io_bl_xa; }};")
    image.declare("struct io_buf_free { struct hlist_node list; void *mem; unsigned long size; };")
    virt = {n: FRAMES.virt(FRAMES.page(n)) for n in range(1, 6)}
    arrays = {n: DATA + 4096 + 16 * n for n in virt}
    for n, array in arrays.items():
        image.words(array, FRAMES.page(n), FRAMES.page(n) + 64)
    ctx, ring, free = DATA, DATA + 2048, DATA + 3072
    members = {"rings": virt[1], "sq_sqes": virt[2], "io_bl_xa.xa_head": ring}
    expected = {1, 2}
    if minor >= 14:
        members = {"ring_region.pages": arrays[1], "sq_region.pages": arrays[2]}
        members |= {"io_bl_xa.xa_head": ring, "rings": 0xFFFFC90000001000}
    elif minor >= 10:
        members |= {"ring_pages": arrays[1], "sqe_pages": arrays[2]}
    if minor >= 14:
        image.make("struct io_buffer_list", ring, {"region.pages": arrays[3]})
        expected.add(3)
    elif minor >= 10:
        image.make("struct io_buffer_list", ring, {"buf_pages": arrays[3], "buf_nr_pages": 2})
        expected.add(3)
    elif minor >= 4:
        image.make("struct io_buffer_list", ring, {"buf_ring": virt[3], "is_mmap": 1})
        expected.add(3)
    else:
        image.make("struct io_buffer_list", ring, {"buf_pages": ring, "buf_ring": ring})
    if 6 <= minor <= 9:
        members["io_buf_list.first"] = free
        image.make("struct io_buf_free", free, {"list.next": free + 64, "mem": virt[3]})
        image.make("struct io_buf_free", free + 64, {"mem": virt[4]})
        expected.add(4)
    image.make("struct io_ring_ctx", ctx, members)
    coverage = Coverage()
    found = set(io_uring_pages(image, [ctx], coverage))
    assert found == {FRAMES.page(n) for n in expected}
    assert not coverage.unreadable


@pytest.mark.parametrize(
    ("release", "member", "element"),
    [
        ("6.2", "struct obj_cgroup **obj_cgroups;", ""),
        (
            "6.10",
            "struct pcpuobj_ext *obj_exts;",
            "struct pcpuobj_ext { struct obj_cgroup *cgroup; };",
        ),
        (
            "6.11, profiling",
            "struct pcpuobj_ext *obj_exts;",
            "struct pcpuobj_ext { struct obj_cgroup *cgroup; unsigned long tag; };",
        ),
    ],
)
def test_percpu_memory(release: str, member: str, element: str) -> None:
    """mm/percpu-internal.h: allocations of 16 and 8 bytes are charged, one of 32 bytes is not."""
    image = MadeImage()
    image.declare(f"{element} struct pcpu_chunk {{ {member} }};")
    image.variable("pcpu_unit_offsets", "unsigned long *", VARIABLES)
    image.words(VARIABLES, DATA)
    image.words(DATA, 0, 0x10000)
    size, vector = 16 if "profiling" in release else 8, DATA + 4096
    image.write(vector, bytes(1024 * size))
    image.words(vector, OBJCG)
    image.words(vector + 12 * size, OBJCG + 64)
    chunk = PcpuChunk(
        address=DATA,
        base=0xFFFFE8FFFFC00000,
        nr_pages=1,
        vector=vector,
        alloc_map=(1 << 14) - 1,  # 4, 8 and 2 units of 4 bytes
        bound_map=1 | 1 << 4 | 1 << 12 | 1 << 14 | 1 << 1024,
        start=0,
        end=4096,
    )
    reader = PercpuReader(image)
    found = [(area.offset, area.size, area.objcg) for area in reader.charged(chunk)]
    assert found == [(0, 16, OBJCG), (48, 8, OBJCG + 64)]
    # pcpu_obj_full_size(): both CPUs, and a pointer for each unit
    charges = [reader.charge(area) for area in reader.charged(chunk)]
    assert charges == [2 * 16 + 4 * 8, 2 * 8 + 2 * 8]
    assert not reader.coverage.unreadable
