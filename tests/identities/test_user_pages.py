# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``user_pages``, by hand and on images of kernels.

Workload ``states`` leaves pages in every state, and ``pressure`` swaps. What is found on an idle
guest is also compared with what the guest itself read in ``memory.stat``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from labkit import kernels, kmodules
from labkit.paths import FIXTURES
from support.guest_files import still
from support.guests import DEBIAN_KERNELS, KERNELS, GuestImage, Lab, gigantic
from support.made import DEAD, OBJCG_A, OBJCG_B, OBJCG_DEAD, ROOT, A, B, features, snapshot
from support.planters import planters_of
from support.planters.user_pages import PAGES
from support.planting import Fault, NoVictim, Subject, ended

from memcg_inspect.checks.found import FoundAmounts
from memcg_inspect.checks.identities.user_pages import ITEMS, has_nodes, user_page_rows
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.ledger import Ledger
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import page_layout, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage, Running, Stat
from memcg_inspect.model_pages import UserPages
from memcg_inspect.report import Report, Row
from memcg_inspect.tables import NotRead

#: Pages by payer, node and item.
FOUND = {
    (OBJCG_A, 0, "NR_ANON_MAPPED"): 3,
    (OBJCG_DEAD, 0, "NR_ANON_MAPPED"): 4,
    (OBJCG_B, 1, "NR_FILE_PAGES"): 5,
    (OBJCG_B, 0, "NR_FILE_PAGES"): 2,
    (0xBAD, 0, "NR_ANON_MAPPED"): 9,
}


def made(
    found: dict[tuple[int, int, str], int] | None = None, collapsed: bool = False, **more: Any
) -> Snapshot:
    """The nodes of ``NR_FILE_PAGES`` are off by 3, the memcg is not."""
    nodes = {(A, 0): {"NR_ANON_MAPPED": 7}, (B, 0): {"NR_FILE_PAGES": 5}}
    nodes |= {(B, 1): {"NR_FILE_PAGES": 2}}
    items = {item: Stat(0, 0, 0) for item in ITEMS}
    return snapshot(
        **{
            "features": features(*ITEMS),
            "memcg_stats": {
                memcg: {**items, "NR_ANON_MAPPED": Stat(7, 0, 0), "NR_FILE_PAGES": Stat(7, 0, 0)}
                if memcg in (ROOT, A)
                else {**items, "NR_FILE_PAGES": Stat(7 if memcg == B else 0, 0, 0)}
                for memcg in (ROOT, A, B, DEAD)
            },
            "lruvec_stats": {
                (memcg, nid): {
                    **items,
                    **{
                        item: Stat(sum(_below(nodes, memcg, nid, item)), 0, 0)
                        for item in ("NR_ANON_MAPPED", "NR_FILE_PAGES")
                    },
                }
                for memcg in (ROOT, A, B, DEAD)
                for nid in (0, 1)
            },
            "user_pages": UserPages(FOUND if found is None else found, collapsed),
            **more,
        }
    )


def _below(
    nodes: dict[tuple[int, int], dict[str, int]], memcg: int, nid: int, item: str
) -> list[int]:
    members = {ROOT: (A, B), A: (A, B)}.get(memcg, (memcg,))
    return [nodes.get((m, nid), {}).get(item, 0) for m in members]


def by_cell(rows: list[Row]) -> dict[tuple[int | None, int | None, str], Row]:
    return {(row.memcg, row.nid, row.item): row for row in rows}


def test_pages_and_counters_agree() -> None:
    rows = by_cell(user_page_rows(made()))
    assert {key: row.status for key, row in rows.items()} == {
        (A, 0, "NR_ANON_MAPPED"): "exact",
        (B, None, "NR_FILE_PAGES"): "exact",
    }
    # The pages of the removed memcg are its parent's.
    assert rows[A, 0, "NR_ANON_MAPPED"].found == {"pages": 7}
    assert {row.unit for row in rows.values()} == {"pages"}


@pytest.mark.parametrize(("item", "nid"), [("NR_ANON_MAPPED", 0), ("NR_FILE_PAGES", None)])
@pytest.mark.parametrize("amount", [1, -2])
def test_a_page_too_many(item: str, nid: int | None, amount: int) -> None:
    found = Counter(FOUND)
    found[OBJCG_A, 0, item] += amount
    rows = by_cell(user_page_rows(made(dict(found))))
    assert (rows[A, nid, item].status, rows[A, nid, item].difference) == ("differs", -amount)
    outcomes = {i.name: i.status for i in judge(made(dict(found))).identities}
    assert outcomes["user_pages"] == "findings"


def test_what_huge_pages_of_files_may_have_changed() -> None:
    found = {**FOUND, (OBJCG_B, 0, "NR_FILE_PAGES"): 1, (OBJCG_A, 0, "NR_ANON_MAPPED"): 1}
    rows = by_cell(user_page_rows(made(found, collapsed=True)))
    assert rows[B, None, "NR_FILE_PAGES"].status == "unverifiable"
    assert rows[B, None, "NR_FILE_PAGES"].reason == (
        "pages were put together to huge pages, which this kernel may have counted for other "
        "memcgs (collapse_file())"
    )
    # Old pages may have been counted for the memcg, or not: it may have more or less.
    more = {**FOUND, (OBJCG_B, 0, "NR_FILE_PAGES"): 3}
    too_many = by_cell(user_page_rows(made(more, collapsed=True)))
    assert too_many[B, None, "NR_FILE_PAGES"].status == "unverifiable"
    assert rows[A, 0, "NR_ANON_MAPPED"].status == "differs"
    assert rows.keys() == by_cell(user_page_rows(made(found))).keys()


def test_what_cgroup_v1_does_not_promise() -> None:
    v1 = features(*ITEMS, default_hierarchy=False)
    found = {(OBJCG_A, 0, item): 3 for item in ITEMS}
    left_out = {"NR_SWAPCACHE", "NR_SHMEM_THPS", "NR_FILE_THPS"}
    assert {row.item for row in user_page_rows(made(found, features=v1))} == set(ITEMS) - left_out
    assert {row.item for row in user_page_rows(made(found))} == set(ITEMS)


def test_the_root_of_kernels_that_do_not_charge_it() -> None:
    found = {(ROOT, 0, "NR_SHMEM"): 3}
    before = features(*ITEMS, lru_holds_objcg=False)
    assert (ROOT, 0, "NR_SHMEM") in by_cell(user_page_rows(made(found)))
    assert ROOT not in {row.memcg for row in user_page_rows(made(found, features=before))}


@pytest.mark.parametrize(
    ("missing", "items", "reason"),
    [
        ("lru", set(ITEMS), "lru memory is not all in the image"),
        ("kmem", {"NR_FILE_MAPPED"}, "kmem memory is not all in the image"),
        (
            "user_pages",
            set(ITEMS),
            "files of dirty pages, or parts of large folios, are not all in the image",
        ),
    ],
)
def test_what_could_not_be_read(missing: Any, items: set[str], reason: str) -> None:
    ledger, coverage = Ledger(), {"user_pages": Coverage()}
    if missing == "user_pages":
        coverage["user_pages"].miss("file of a dirty page", 0x10, "not in the image")
    else:
        ledger.note_missing(missing)
    rows = user_page_rows(made({}, charges=ledger, coverage=coverage))
    unverifiable = {(row.item, row.reason) for row in rows if row.status == "unverifiable"}
    assert unverifiable == {(item, reason) for item in items}
    # What is found cannot be too much.
    [more] = [
        row
        for row in user_page_rows(
            made({(OBJCG_B, 0, "NR_FILE_MAPPED"): 1}, charges=ledger, coverage=coverage)
        )
        if (row.memcg, row.nid, row.item) == (B, 0, "NR_FILE_MAPPED")
    ]
    assert more.status == "differs"


def test_what_is_found_for_a_line() -> None:
    found = FoundAmounts(made())
    assert [found.own(A, "NR_ANON_MAPPED", nid) for nid in (0, 1, None)] == [7, 0, 7]
    assert [found.own(B, "NR_FILE_PAGES", nid) for nid in (0, None)] == [None, 7]
    assert [found.subtree(m, "NR_FILE_PAGES") for m in (ROOT, A, B)] == [7, 7, 7]
    assert found.own(A, "PGSCAN_DIRECT") is None
    ledger = Ledger()
    ledger.note_missing("lru")
    assert isinstance(FoundAmounts(made(charges=ledger)).own(A, "NR_SHMEM"), NotRead)
    kernel = replace(features("NR_SHMEM"), has_local=True)
    assert FoundAmounts(made(features=kernel)).own(A, "NR_ANON_MAPPED") is None


@pytest.mark.parametrize(("identity", "most"), [("user_pages", 8), ("lru", 4)])
def test_rows_in_which_one_folio_shows(identity: str, most: int) -> None:
    """One CPU that works on a folio explains that many rows, and none if there are more."""
    cpu = Running(0, 7, "sh", ("folio_add_lru", "do_syscall_64", "entry_SYSCALL_64"), True)

    def statuses(number: int) -> set[str]:
        keys = (RowKey(identity, f"ITEM_{n}", "pages", A, 0) for n in range(number))
        rows = [make_row(key, {"pages": 5}, {"folded": 6}) for key in keys]
        return {row.status for row in mark_in_flight(snapshot(running=[cpu]), rows)}

    assert statuses(most) == {"unverifiable"}
    assert statuses(most + 1) == {"differs"}


def states(lab: Lab, kernel: str) -> GuestImage:
    modules = kmodules.with_dependencies(kernels.kernel(kernel), "loop")
    return lab.image(kernel, "2", "states", modules=modules, freeze="busy")


def rows_of(report: Report) -> list[Row]:
    return [row for row in report.rows if row.identity == "user_pages"]


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_pages_in_every_state(lab: Lab, kernel: str) -> None:
    report = states(lab, kernel).report()
    rows = rows_of(report)
    assert report.coverage["user_pages"].unreadable == 0
    paths = {memcg.address: memcg.path for memcg in report.memcgs}
    # A task of another memcg may have been stopped while it made a page.
    others = [row for row in rows if not paths[row.memcg or 0].startswith("/states")]
    assert [row for row in others if row.status == "differs"] == []
    assert [row for row in rows if row.status != "exact" and row not in others] == []
    found: Counter[tuple[str, str]] = Counter()
    for row in rows:
        found[paths[row.memcg or 0], row.item] += row.found["pages"]
    # What the workload wrote: 3 MiB, twice; one of the memcgs was removed. The kernel may have
    # written some of it back.
    assert found["/states/dirty", "NR_FILE_PAGES"] == found["/states", "NR_FILE_PAGES"] == 768
    assert 0 < found["/states/dirty", "NR_FILE_DIRTY"] <= 768
    assert 0 < found["/states", "NR_FILE_DIRTY"] <= 768
    assert found["/states/writer", "NR_WRITEBACK"] == 64
    assert found["/states/bpf", "NR_FILE_MAPPED"] >= 10
    # Four huge pages of a file. Of the second, forty pages are mapped, of the last one none is.
    assert found["/states/huge", "NR_SHMEM_THPS"] == found["/states/huge", "NR_SHMEM"] == 2048
    assert found["/states/huge", "NR_FILE_MAPPED"] == 2 * 512 + 40
    # Three anonymous ones: one split by a child, which does not change it, and one that is half.
    assert found["/states/anon", "NR_ANON_THPS"] == 2 * 512
    assert found["/states/anon", "NR_ANON_MAPPED"] >= 2 * 512 + 256


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
@pytest.mark.parametrize(
    "freeze", ["settled", "busy", pytest.param("panic", marks=pytest.mark.long)]
)
def test_huge_pages_and_swap(lab: Lab, kernel: str, freeze: str) -> None:
    image = lab.image(kernel, "2", "pressure", append="transparent_hugepage=always", freeze=freeze)
    report = image.report()
    assert [row for row in rows_of(report) if row.status == "differs"] == []
    assert {row.status for row in rows_of(report)} == {"exact"} or freeze != "settled"
    found: Counter[str] = Counter()
    for row in rows_of(report):
        found[row.item] += row.found["pages"]
    assert found["NR_ANON_MAPPED"] and found["NR_SHMEM"]
    # Under load, the last folio may just have left the swap cache.
    assert found["NR_SWAPCACHE"] or freeze != "settled"


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_under_load(lab: Lab, kernel: str) -> None:
    """Huge pages are made and split without end."""
    image = lab.image(kernel, "2", "thpsplit", append="transparent_hugepage=always", freeze="busy")
    assert [f for f in image.report().findings if f.identity == "user_pages"] == []


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", [k for k in DEBIAN_KERNELS if k in ("7.2", "7.3")])
def test_huge_pages_of_hugetlb(lab: Lab, kernel: str) -> None:
    """A page of 1 GiB is charged. It counts in no other state, although it is mapped."""
    image = gigantic(lab, kernel)
    assert still(image, "memory.stat")["/gigantic", "hugetlb", None] == 1 << 30
    subject = Subject(image.program())
    rows = [r for r in rows_of(subject.report) if subject.path(r.memcg or 0) == "/gigantic"]
    found = {row.item: (row.status, row.nid, row.found["pages"]) for row in rows}
    assert found["NR_HUGETLB"] == ("exact", None, 1 << 18)
    assert sum(pages for item, (_, _, pages) in found.items() if item != "NR_HUGETLB") < 1 << 10
    # The owner of the page is lost.
    frames, layout = mem_map(subject.image), page_layout(subject.image)
    [folio] = [
        piece.raw.page + i * frames.size
        for piece in scan_pages(subject.image)
        if piece.raw is not None
        for i, order in piece.raw.orders.items()
        if order == 18
    ]
    fault = Fault((subject.put(folio + layout.memcg_data, 0),), ("/gigantic",), set())
    told = {(f.identity, f.item, f.difference) for f in subject.audit(fault).findings}
    assert ("user_pages", "NR_HUGETLB", 1 << 18) in told


@pytest.mark.long
@pytest.mark.image
@pytest.mark.newest_kernel
def test_huge_pages_of_files(lab: Lab) -> None:
    """A file of ext4, which has large folios (since 6.16)."""
    script = str(FIXTURES / "scenes/hugefile.sh")
    image = lab.image("7.3", "2", "idle", modules=(("+loop", ""),), run=script)
    said = still(image, "memory.stat")["/hugefile", "file_thp", None]
    subject = Subject(image.program())
    rows = [r for r in rows_of(subject.report) if subject.path(r.memcg or 0) == "/hugefile"]
    found = {r.item: (r.status, r.found["pages"]) for r in rows if r.nid is None}
    # Single folios may have been allocated in smaller pieces.
    assert said >= 20 << 20
    assert found["NR_FILE_THPS"] == ("exact", said // 4096)
    assert subject.report.verdict == "exact"
    counter = subject.percpu_counter("/hugefile", "NR_FILE_THPS")
    fault = Fault((subject.add(counter, 512),), ("/hugefile",), set())
    told = {(f.identity, f.item, f.difference) for f in subject.audit(fault).findings}
    assert ("user_pages", "NR_FILE_THPS", 512) in told


#: Lines of memory.stat by counter.
LINES = {
    "anon": "NR_ANON_MAPPED",
    "file": "NR_FILE_PAGES",
    "shmem": "NR_SHMEM",
    "file_mapped": "NR_FILE_MAPPED",
    "file_dirty": "NR_FILE_DIRTY",
    "file_writeback": "NR_WRITEBACK",
    "swapcached": "NR_SWAPCACHE",
    "anon_thp": "NR_ANON_THPS",
    "file_thp": "NR_FILE_THPS",
    "shmem_thp": "NR_SHMEM_THPS",
    "hugetlb": "NR_HUGETLB",
}


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "append", ["", pytest.param("transparent_hugepage=always", marks=pytest.mark.long)]
)
def test_the_guest_read_the_same(lab: Lab, kernel: str, append: str) -> None:
    """Its files include the memcgs below. The processes that read them are in the root memcg."""
    image = lab.image(kernel, "4", "mixed", append=append)
    snapshot = collect(image_of(image.program()))
    found, size = FoundAmounts(snapshot), snapshot.image.page_size
    by_path = {m.path: m.address for m in snapshot.memcgs.values() if m.state == "online"}
    compared: Counter[str] = Counter()
    for file in ("memory.stat", "memory.numa_stat"):
        for (path, name, nid), value in still(image, file).items():
            item = LINES.get(name)
            if path == "/" or item is None or (nid is not None and not has_nodes(snapshot, item)):
                continue
            pages = found.subtree(by_path[path], item, nid)
            assert isinstance(pages, int)
            assert (path, name, nid, pages * size) == (path, name, nid, value)
            compared[name] += value > 0
    assert min(compared[name] for name in ("anon", "file", "shmem", "anon_thp")) > 3


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_planted_faults(lab: Lab, kernel: str) -> None:
    """On kernels up to 6.19, huge pages excuse some of them: `files` has none."""
    subject = Subject(lab.image(kernel, "4", "files").program())
    outcomes = {}
    for planter in (*planters_of("user_pages"), *PAGES):
        try:
            fault = planter.plant(subject, planter.sizes[0])
        except NoVictim:
            outcomes[planter.what] = "no victim"
            continue
        now = subject.audit(fault)
        outcomes[planter.what] = ended(subject.report, "user_pages", fault, now).outcome
    assert set(outcomes.values()) - {"no victim"} == {"found"}
    # What an image has not is left out: pages of one kind may all be on the node of their counter.
    assert list(outcomes.values()).count("found") >= 10
