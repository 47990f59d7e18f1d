# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages that nothing marks have the owners that the workload ``buffers`` gave them, and those that the
guest's own files tell.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
from support.guests import (
    DEBIAN_KERNELS,
    KERNELS,
    GuestImage,
    Lab,
    isolated,
    series,
)
from support.views import number, rows

from memcg_inspect.image.image import image_of
from memcg_inspect.tables import Answer
from memcg_inspect.views.pages import pages

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

PAGE = 4096
#: What fixtures/workloads/buffers.c makes.
TRACE_BYTES, PERF_PAGES, PIPE_PAGES = 1000 << 10, 64 + 1, 48
SECRET_PAGES, LOCKED_PAGES = 24, 40
#: ``BUF_PAGE_SIZE``: bytes of a page that events can have.
TRACE_PAGE = PAGE - 16


def buffers(lab: Lab, kernel: str) -> GuestImage:
    # Secret memory is off by default up to 6.4.
    return lab.image(kernel, "2", "buffers", append="secretmem.enable=1")


@lru_cache(maxsize=4)
def asked(core: Path, by: tuple[str, ...]) -> Answer:
    return pages(image_of(GuestImage(core).program()), by)


def by_kind(answer: Answer, memcg: str | None = None) -> Counter[str]:
    """Return the bytes of each kind, paid by a memcg or in all."""
    found: Counter[str] = Counter()
    for row in rows(answer):
        if memcg is None:
            found[str(row["kind"])] += number(row, "bytes")
        elif row["memcg"] == memcg:
            found[str(row["kind"])] += number(row, "paid")
    return found


@pytest.mark.long
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_ring_buffers(lab: Lab, kernel: str) -> None:
    with_buffers, without = (
        by_kind(asked(image.core, ("kind",)))
        for image in (buffers(lab, kernel), lab.image(kernel, "2", "idle"))
    )
    assert without["perf"] == 0
    assert with_buffers["perf"] == PERF_PAGES * PAGE
    # One CPU on each node. Before, each has the least that a ring can have, two pages.
    more = 2 * (-(-TRACE_BYTES // TRACE_PAGE) - 2)
    assert with_buffers["trace"] - without["trace"] == more * PAGE
    assert abs(with_buffers["unknown"] - without["unknown"]) < 40 * PAGE


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_pipes(lab: Lab, kernel: str) -> None:
    answer = asked(buffers(lab, kernel).core, ("kind", "memcg"))
    paid = by_kind(answer, "/buffers/pipe")
    # Since 7.3, a pipe keeps up to 8 pages for the next write.
    assert PIPE_PAGES <= paid["pipe"] // PAGE <= PIPE_PAGES + 8
    assert paid["kmem"] == 0


def lru(answer: Answer) -> Counter[str]:
    """Return the pages of each LRU list."""
    found: Counter[str] = Counter()
    for row in rows(answer):
        if row["lru"] is not None:
            found[str(row["lru"])] += number(row, "bytes") // PAGE
    return found


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_locked_memory(lab: Lab, kernel: str) -> None:
    """The guest counts it in /proc/meminfo."""
    image = buffers(lab, kernel)
    answer = asked(image.core, ("kind", "memcg", "lru"))
    assert by_kind(answer, "/buffers/secret")["secretmem"] == SECRET_PAGES * PAGE
    locked = [row for row in rows(answer) if row["memcg"] == "/buffers/locked"]
    assert {number(row, "paid") for row in locked if row["lru"] == "mlocked"} >= {
        LOCKED_PAGES * PAGE
    }
    found = lru(asked(image.core, ("lru",)))
    # CPUs add their changes to the totals within seconds.
    said, unevictable = (
        [meminfo(image, which, name) for which in ("2", "3")] for name in ("Mlocked", "Unevictable")
    )
    assert found["mlocked"] in said, said
    assert found["mlocked"] + found["unevictable"] in unevictable, unevictable
    # The mapping of secret memory is unevictable, and its pages are.
    assert found["mlocked"] >= LOCKED_PAGES
    assert found["unevictable"] >= SECRET_PAGES


def meminfo(image: GuestImage, which: str, name: str) -> int:
    """Return a line of /proc/meminfo, in pages."""
    text = (image.guest / which / "proc/meminfo").read_text()
    found = re.search(rf"^{name}: +(\d+) kB$", text, re.M)
    assert found is not None
    return int(found[1]) * 1024 // PAGE


#: Hash tables that are from memblock, or whose size no variable has.
NOT_FOUND = ("Dentry cache", "Inode-cache", "Table-perturb", "posixtimers", "futex")


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_hash_tables(lab: Lab, kernel: str) -> None:
    """The kernel says their sizes when it boots. With several nodes, they are vmalloc areas."""
    image = lab.image(kernel, "1", "idle")
    log = (image.guest / "2/dmesg").read_text()
    made = re.findall(r"\] (.*) hash table entries: .* (\d+) bytes, linear\)", log)
    # The table of futexes is one up to 6.15.
    left_out = NOT_FOUND[: -1 if series(kernel) in ("6.1", "6.12") else None]
    sizes = [int(size) for name, size in made if name not in left_out]
    answer = asked(image.core, ("kind",))
    assert by_kind(answer)["hash_table"] == sum(sizes)
    assert len(sizes) >= 7
    assert by_kind(answer)["unknown"] < by_kind(answer).total() // 1000
    of_nodes = asked(lab.image(kernel, "2", "idle").core, ("kind",))
    assert by_kind(of_nodes)["hash_table"] == 0


#: Kernels and versions of cgroups. Debian's newer kernels have none of version 1.
CGROUPS = [
    *((kernel, "v2") for kernel in DEBIAN_KERNELS),
    *((kernel, "v1") for kernel in KERNELS if kernel in ("6.1", "7.3-lab")),
]


@pytest.mark.parametrize(("kernel", "cgroup"), CGROUPS)
def test_buffers_of_sockets_that_no_memcg_pays_for(lab: Lab, kernel: str, cgroup: str) -> None:
    """With cgroup v1, sockets refer to no memcg. The guest counts the memory of TCP."""
    image = lab.image(kernel, "4", "mixed", cgroup=cgroup)
    found = by_kind(asked(image.core, ("kind",)))
    text = (image.guest / "2/proc/net/sockstat").read_text()
    counted = re.search(r"^TCP: .* mem (\d+)$", text, re.M)
    assert counted is not None
    assert found["page_frag"] // PAGE >= int(counted[1]) > 400
    assert found["unknown"] < found.total() // 2000


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_page_tables_for_user_space(lab: Lab, kernel: str) -> None:
    """With page table isolation, there are tables for what user space sees of the kernel."""
    image = isolated(lab, kernel)
    assert "Kernel/User page tables isolation: enabled" in (image.guest / "2/dmesg").read_text()
    answer, plain = (asked(i.core, ("kind",)) for i in (image, lab.image(kernel, "1", "idle")))
    found, before = by_kind(answer), by_kind(plain)
    # At least those of each level below the top for what is not shared: code of the entry.
    assert before["kernel_pagetables"] + 3 * PAGE <= found["kernel_pagetables"]
    # The second page of a table at the top of 300 processes would be much more.
    assert abs(found["unknown"] - before["unknown"]) < 300 * PAGE // 2
    # Each process has at least six tables, of which the one at the top has two pages.
    assert found["pagetables"] > before["pagetables"] + 300 * 7 * PAGE
    assert all(zone["found"] == zone["present"] for zone in rows(answer, 1))
