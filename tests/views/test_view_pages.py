# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``pages`` is compared with the guest's /proc/zoneinfo, meminfo and vmstat, with the kernel's own
lists of free pages, with a plain walk of the page flags, and with what a module hides.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import drgn
import pytest
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.list import list_for_each
from drgn.helpers.linux.mm import PageLRU, PageSlab, compound_order, for_each_valid_page_range
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, KERNELS, ROOT, GuestImage, Lab, gigantic
from support.views import number, rows

from memcg_inspect.image.image import image_of
from memcg_inspect.model_pages import KINDS
from memcg_inspect.tables import Answer
from memcg_inspect.views.pages import pages

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

PAGE = 4096
#: Kernel, nodes and workload. Nodes 2 and up of ``2cpu+1mem`` have memory and no CPU.
IMAGES = [
    *((kernel, "4", "mixed") for kernel in KERNELS),
    *((kernel, "2cpu+1mem", "idle") for kernel in DEBIAN_KERNELS),
]


#: Kernels that do not mark large kmallocs.
UNMARKED = ("6.1", "6.12", "6.12-lab")


@lru_cache(maxsize=4)
def asked(core: Path, by: tuple[str, ...] = ()) -> Answer:
    return pages(image_of(GuestImage(core).program()), by or None)


def kinds(answer: Answer) -> Counter[str]:
    """Return the pages of each kind."""
    found: Counter[str] = Counter()
    for row in rows(answer):
        found[str(row["kind"])] += number(row, "pages")
    return found


def zoneinfo(image: GuestImage, which: str) -> dict[tuple[int, str], Counter[str]]:
    """Return /proc/zoneinfo by node and zone; ``pcp`` is the sum of all CPUs."""
    found: dict[tuple[int, str], Counter[str]] = {}
    zone: Counter[str] = Counter()
    for line in (image.guest / which / "proc/zoneinfo").read_text().splitlines():
        words = line.split()
        if words[0] == "Node":
            zone = found[int(words[1].rstrip(",")), words[3]] = Counter()
        elif words[0] == "count:":
            zone["pcp"] += int(words[1])
        elif words[:2] == ["pages", "free"]:
            zone["free"] = int(words[2])
        elif len(words) == 2 and words[1].isdigit():
            zone[words[0]] = int(words[1])
    return found


def check_whole(answer: Answer) -> None:
    """Check that all pages are there, once."""
    assert answer.coverage["owners"].unreadable == 0, answer.coverage["owners"].examples
    missed = {name: c.examples for name, c in answer.coverage.items() if c.unreadable}
    assert missed == {}
    for row in rows(answer, 1):
        assert row["found"] == row["present"], row
        parts = ("free", "user", "kernel", "other", "unknown")
        assert row["found"] == sum(number(row, part) for part in parts)
    for row in rows(answer):
        parts = ("paid", "unpaid", "never", "unused")
        assert number(row, "pages") * PAGE == sum(number(row, part) for part in parts), row
        assert number(row, "pages") > 0
        assert all(number(row, part) >= 0 for part in parts), row


@pytest.mark.parametrize(("kernel", "nodes", "workload"), IMAGES)
def test_every_page_is_there_once(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    image = lab.image(kernel, nodes, workload)
    answer = asked(image.core)
    check_whole(answer)
    found: Counter[tuple[object, object]] = Counter()
    for row in rows(answer):
        found[row["node"], row["zone"]] += number(row, "pages")
    said = zoneinfo(image, "2")
    present = {key: zone["present"] for key, zone in said.items() if zone["present"]}
    assert found == present
    assert len({nid for nid, _ in present}) == (4 if nodes == "4" else 3)


@pytest.mark.parametrize(("kernel", "nodes", "workload"), IMAGES)
def test_free_pages(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    """The kernel's own lists have them, and the guest saw nearly as many."""
    image = lab.image(kernel, nodes, workload)
    found: Counter[tuple[object, ...]] = Counter()
    for row in rows(asked(image.core, ("node", "zone", "kind", "order"))):
        if str(row["kind"]).startswith("free"):
            found[row["node"], row["zone"], row["kind"], row["order"]] += number(row, "pages")
    assert found == free_pages(image.program())
    said, total = zoneinfo(image, "2"), Counter[tuple[object, object]]()
    for (nid, zone, _, _), count in found.items():
        total[nid, zone] += count
    for (nid, zone), values in said.items():
        if values["present"]:
            seen = values["free"] + values["pcp"]
            # The guest frees the memory of the programs that copied the files.
            assert abs(total[nid, zone] - seen) <= max(2000, seen // 20), (nid, zone)


def free_pages(prog: drgn.Program) -> Counter[tuple[object, ...]]:
    """Count the pages on all lists of free pages, one by one."""
    found: Counter[tuple[object, ...]] = Counter()
    for pgdat in for_each_online_pgdat(prog):
        for zone in pgdat.node_zones:
            if not zone.present_pages:
                continue
            key = int(pgdat.node_id), zone.name.string_().decode()
            for order, area in enumerate(zone.free_area):
                for head in area.free_list:
                    found[(*key, "free", order)] += (
                        sum(1 for _ in list_for_each(head.address_of_())) << order
                    )
            on_cpus, counted = 0, 0
            for cpu in for_each_possible_cpu(prog):
                pcp = per_cpu_ptr(zone.per_cpu_pageset, cpu)
                counted += int(pcp.count)
                for index, head in enumerate(pcp.lists):
                    order = index // 3 if index < 12 else 9
                    blocks = sum(1 for _ in list_for_each(head.address_of_()))
                    found[(*key, "free_pcp", order)] += blocks << order
                    on_cpus += blocks << order
            assert on_cpus == counted
    return +found


@pytest.mark.parametrize(("kernel", "nodes", "workload"), IMAGES)
def test_marked_pages(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    """A plain walk finds as many slabs, and as many pages on LRU lists."""
    image = lab.image(kernel, nodes, workload)
    prog = image.program()
    slabs = lru = 0
    for start, end, base in for_each_valid_page_range(prog):
        page, number_of_page = base + start, start
        while number_of_page < end:
            size = 1 << compound_order(page).value_()
            slabs += size * bool(PageSlab(page))
            lru += size * bool(PageLRU(page))
            page, number_of_page = page + size, number_of_page + size
    found = kinds(asked(image.core))
    kfence = sum(bool(page) for page in [found["kfence"]]) and kfence_slabs(prog)
    assert found["slab"] == slabs - kfence
    on_lists = sum(
        number(row, "pages")
        for row in rows(asked(image.core, ("kind", "lru")))
        if row["lru"] not in (None, "none")
    )
    assert on_lists == lru > 500


def kfence_slabs(prog: drgn.Program) -> int:
    """Return the pages of the pool of KFENCE that look like slabs."""
    pool, found = prog["__kfence_pool"].value_(), 0
    first = drgn.Object(prog, "struct page *", drgn.helpers.linux.mm.virt_to_page(prog, pool))
    for index in range(2 * 256):
        found += bool(PageSlab(first + index))
    return found


def meminfo(image: GuestImage) -> dict[str, int]:
    """Return the lines of /proc/meminfo, in pages."""
    text = (image.guest / "2/proc/meminfo").read_text()
    return {
        name: int(value) * 1024 // PAGE
        for name, value in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)
    }


@pytest.mark.parametrize(("kernel", "nodes", "workload"), IMAGES)
def test_kernel_memory_is_that_of_meminfo(lab: Lab, kernel: str, nodes: str, workload: str) -> None:
    image = lab.image(kernel, nodes, workload)
    found, said = kinds(asked(image.core)), meminfo(image)
    for name, value in (
        ("Slab", found["slab"] + found["large_kmalloc"]),
        ("VmallocUsed", found["vmalloc"] + found["text"] + found["stack"]),
        ("PageTables", found["pagetables"]),
    ):
        # The copying programs are gone, and slabs are freed when CPUs find the time.
        most = max(200, said[name] // 10)
        # Large kmallocs without a mark are counted as slab memory, and found as other pages.
        unmarked = found["kmem"] + found["unknown"] if kernel in UNMARKED else 0
        assert -most <= said[name] - value <= most + unmarked * (name == "Slab"), name
    prog, percpu = image.program(), found["percpu"] + found["percpu_first"]
    units = prog["pcpu_nr_units"].value_()
    populated = prog.read_u64(prog.symbol("pcpu_nr_populated").address)
    assert percpu == populated * units
    # A worker populates pages, and gives some back, when it likes.
    assert abs(percpu - said["Percpu"]) <= 8 * units


@pytest.mark.parametrize("kernel", KERNELS)
def test_dimensions_add_up(lab: Lab, kernel: str) -> None:
    """Each way to sum up is of all pages."""
    image = lab.image(kernel, "4", "mixed")
    whole = sum(number(row, "bytes") for row in rows(asked(image.core)))
    for by in (("memcg", "node"), ("kind", "cache"), ("kind", "caller", "lru", "order")):
        answer = asked(image.core, by)
        assert sum(number(row, "bytes") for row in rows(answer)) == whole
    kernel_paid = sum(number(row, "kernel_paid") for row in rows(asked(image.core), 1))
    bill = rows(asked(image.core, ("memcg", "kind")))
    paid = sum(number(row, "paid") for row in bill if KINDS[str(row["kind"])].group == "kernel")
    assert paid == kernel_paid > 0
    assert {row["memcg"] for row in bill} > {None, "/files/web"}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("workload", ["idle", "mixed"])
def test_unknown_is_little(lab: Lab, kernel: str, workload: str) -> None:
    """What has no mark and no known owner is less than a thousandth of the memory."""
    image = lab.image(kernel, "4", workload)
    found = kinds(asked(image.core))
    assert found["unknown"] < found.total() // 1000


@pytest.mark.parametrize("kernel", [k for k in DEBIAN_KERNELS if k in ("6.1", "7.3")])
def test_huge_pages(lab: Lab, kernel: str) -> None:
    """A page of 1 GiB in use, and 20 of 2 MiB that are free, without most of their memory map."""
    image = gigantic(lab, kernel)
    answer = asked(image.core)
    check_whole(answer)
    found = kinds(answer)
    assert (found["hugetlb"], found["hugetlb_free"]) == (1 << 18, 20 << 9)
    # A struct page takes 64 bytes. A page of the map is left for each huge page, or shared.
    whole = found.total() // 64
    left_out = (1 << 18) // 64 + (20 << 9) // 64
    assert whole - left_out <= found["memmap"] <= whole - left_out + 100


HIDDEN = {4096: 0, 256: 4, 16: 9}


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k in ("6.12-lab", "7.3-lab")])
def test_hidden_memory_is_unknown(lab: Lab, kernel: str) -> None:
    """A module allocates 64 MiB on node 1, in blocks of three orders."""
    module = (str(ROOT / "fixtures/modules/hider"), "")
    without, image = (
        lab.image(kernel, "2", "idle", modules=modules) for modules in ((), (module,))
    )
    answer = asked(image.core)
    check_whole(answer)
    unknown = {name: by_order(of.core) for name, of in (("without", without), ("hidden", image))}
    more = {key: n - unknown["without"][key] for key, n in unknown["hidden"].items()}
    for count, order in HIDDEN.items():
        hidden = count << order
        # Both guests have some memory without a known owner, and not as much at all times.
        assert hidden <= unknown["hidden"][1, order], (order, unknown)
        assert more[1, order] <= hidden + 200, (order, more)
    assert sum(n for (nid, _), n in more.items() if nid == 0) < 200


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k == "7.3-lab"])
@pytest.mark.parametrize("profiling", ["1", "1,compressed"])
def test_hidden_memory_has_a_call_site(lab: Lab, kernel: str, profiling: str) -> None:
    """With allocation profiling, the line of the module has all of it."""
    source = ROOT / "fixtures/modules/hider/hider.c"
    append = f"sysctl.vm.mem_profiling={profiling}"
    image = lab.image(kernel, "2", "idle", modules=((str(source.parent), ""),), append=append)
    answer = asked(image.core, ("node", "kind", "order", "caller"))
    check_whole(answer)
    lines = source.read_text().splitlines()
    (number_of_line,) = (n for n, text in enumerate(lines, 1) if "alloc_pages_node(" in text)
    found = Counter[int]()
    for row in rows(answer):
        if row["kind"] == "unknown" and "hider.c" in str(row["caller"]):
            assert f"hider.c:{number_of_line} [hider] hide()" in str(row["caller"])
            assert row["node"] == 1
            found[number(row, "order")] += number(row, "pages")
    assert found == {order: count << order for count, order in HIDDEN.items()}


def by_order(core: Path) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for row in rows(asked(core, ("node", "kind", "order"))):
        if row["kind"] == "unknown":
            found[number(row, "node"), number(row, "order")] += number(row, "pages")
    return found
