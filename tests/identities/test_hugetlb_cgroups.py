# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Charges of huge pages to cgroups of the hugetlb controller, by hand and on images of kernels.

What the images must say is what the guest's own hugetlb.2MB.current and numa_stat said.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.guest_files import COPIES, in_all, path_of
from support.guests import GuestImage, Lab, series
from support.made_hugetlb import CHARGED, GONE, HUGE, A, B, alone, made
from support.planting import Fault, Subject, Write

from memcg_inspect.checks.identities.hugetlb_nodes import CHECK as NODES
from memcg_inspect.checks.identities.hugetlb_nodes import hugetlb_nodes_rows
from memcg_inspect.checks.identities.hugetlb_usage import hugetlb_usage_rows
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.hugetlb_cgroup import HugetlbChargeReader
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage, Running
from memcg_inspect.report import Report, Row

PAGE = 4096


def off(rows: list[Row]) -> dict[tuple[str, int | None], tuple[str, int | None]]:
    return {(r.item, r.nid): (r.status, r.difference) for r in rows if r.status != "exact"}


def judged(taken: Snapshot) -> dict[tuple[str, int | None], tuple[str, int | None]]:
    return off(mark_in_flight(taken, [*hugetlb_usage_rows(taken), *hugetlb_nodes_rows(taken)]))


def task(*functions: str, pid: int = 7) -> Running:
    return Running(0, pid, "db", (*functions, "handle_mm_fault", "do_syscall_64"), True)


# By hand


def test_rows_of_cgroups_at_rest() -> None:
    rows = [*hugetlb_usage_rows(made()), *hugetlb_nodes_rows(made())]
    assert [(row.item, row.nid, row.found["hugetlb"]) for row in rows] == [
        ("hugetlb.2MB.usage[/a]", None, 2 * HUGE),
        ("hugetlb.2MB.usage[/a/b]", None, 4 * HUGE),
        ("hugetlb.1GB.usage[/a/b]", None, 1 << 18),
        ("hugetlb.2MB.numa_stat[/a]", 0, 2 * HUGE),
        ("hugetlb.2MB.numa_stat[/a/b]", 0, HUGE),
        ("hugetlb.2MB.numa_stat[/a/b]", 1, 3 * HUGE),
        ("hugetlb.1GB.numa_stat[/a/b]", 1, 1 << 18),
    ]
    assert off(rows) == {}


def test_a_node_that_a_cgroup_has_no_usage_of() -> None:
    """It has huge pages there all the same."""
    taken = made()
    one = taken.hugetlb.cgroups[B]
    left = {where: pages for where, pages in one.on_nodes.items() if where != (0, 1)}
    cgroups = {**taken.hugetlb.cgroups, B: one._replace(on_nodes=left)}
    lost = replace(taken, hugetlb=replace(taken.hugetlb, cgroups=cgroups))
    [row] = [row for row in hugetlb_nodes_rows(lost) if row.status != "exact"]
    assert (row.item, row.nid, row.found) == (
        *("hugetlb.2MB.numa_stat[/a/b]", 1),
        {"hugetlb": 3 * HUGE},
    )
    told = ("unverifiable", None, "the cgroup has no usage of this node")
    assert (row.status, row.claimed, row.reason) == told
    assert {tuple(row.claimed or ()) for row in hugetlb_nodes_rows(taken)} == {("usage",)}


@pytest.mark.parametrize("pages", [1, HUGE, -HUGE])
def test_a_page_counter_that_is_off(pages: int) -> None:
    """That of its parent includes it."""
    assert judged(alone(made(), B, 0, pages)) == {
        ("hugetlb.2MB.usage[/a/b]", None): ("differs", pages),
        ("hugetlb.2MB.usage[/a]", None): ("differs", -pages),
    }
    assert judged(made({(B, 0): pages})) == {("hugetlb.2MB.usage[/a/b]", None): ("differs", pages)}


def test_the_usage_of_a_node_that_is_off() -> None:
    for pages in (1, HUGE, -HUGE):
        item = "hugetlb.2MB.numa_stat[/a/b]"
        assert judged(made(on_nodes={(B, 0, 1): pages})) == {(item, 1): ("differs", pages)}


def test_a_cgroup_that_was_removed_is_named_by_its_address() -> None:
    """Nothing may be left in its counters; another one may have its path."""
    found = judged(made({(GONE, 0): HUGE}))
    assert found == {("hugetlb.2MB.usage[0x400]", None): ("differs", HUGE)}


def test_what_is_no_cgroup() -> None:
    charged = {**CHARGED, (0xBAD, 9, 1): HUGE}
    assert judged(made(charged=charged)) == {
        ("hugetlb.2MB.usage[0xbad]", None): ("differs", -HUGE),
        ("hugetlb.2MB.numa_stat[0xbad]", 1): ("differs", -HUGE),
    }


def test_cgroups_or_pages_that_were_not_read() -> None:
    wrong = made({(B, 0): HUGE, (A, 0): -HUGE})
    unread = Coverage(read=1)
    unread.miss("hugetlb cgroup", 1, "not in the image")
    for subject, statuses in (
        ("hugetlb", {"unverifiable"}),
        ("pages", {"unverifiable", "differs"}),  # what is missing can only add
    ):
        wrong.coverage[subject] = unread  # type: ignore[index]
        assert {status for status, _ in judged(wrong).values()} == statuses
        del wrong.coverage[subject]  # type: ignore[attr-defined]


def test_a_huge_page_that_is_half_charged() -> None:
    for function in ("alloc_hugetlb_folio", "alloc_huge_page", "free_huge_folio"):
        taken = made({(B, 0): HUGE}, running=(task(function),))
        assert judged(taken) == {("hugetlb.2MB.usage[/a/b]", None): ("in-flight", HUGE)}
    # page_counter_try_charge() has not come to the parent yet.
    taken = alone(made(running=(task("alloc_hugetlb_folio"),)), B, 0, HUGE)
    assert {status for status, _ in judged(taken).values()} == {"in-flight"}


@pytest.mark.parametrize(
    ("own", "functions"),
    [
        ({(B, 0): HUGE}, ["vfs_read"]),
        ({(B, 0): HUGE - 1}, ["alloc_hugetlb_folio"]),
        ({(B, 0): 2 * HUGE}, ["alloc_hugetlb_folio"]),
        ({(B, 0): HUGE, (A, 0): HUGE}, ["alloc_hugetlb_folio"]),
        ({(B, 0): HUGE, (A, 0): HUGE}, ["alloc_hugetlb_folio", "vfs_read"]),
    ],
)
def test_what_a_task_does_not_explain(
    own: dict[tuple[int, int], int], functions: list[str]
) -> None:
    """Another function, another amount, or more of them than tasks."""
    tasks = tuple(task(function, pid=pid) for pid, function in enumerate(functions, 1))
    assert {status for status, _ in judged(made(own, running=tasks)).values()} == {"differs"}


def test_a_half_charged_page_is_of_the_size_of_its_row() -> None:
    running = (task("alloc_hugetlb_folio"),)
    item = ("hugetlb.1GB.usage[/a/b]", None)
    for pages, status in ((1 << 18, "in-flight"), (HUGE, "differs")):
        assert judged(made({(B, 1): pages}, running=running)) == {item: (status, pages)}


def test_two_tasks_explain_two_pages() -> None:
    tasks = (task("alloc_hugetlb_folio", pid=1), task("alloc_hugetlb_folio", pid=2))
    taken = made({(B, 0): HUGE, (A, 0): HUGE}, running=tasks)
    assert {status for status, _ in judged(taken).values()} == {"in-flight"}


def test_a_stack_that_could_not_be_unwound() -> None:
    unknown = Running(0, 7, "db", (), True)
    found = judged(made({(B, 0): HUGE}, running=(unknown,)))
    assert {status for status, _ in found.values()} == {"unverifiable"}


@pytest.mark.parametrize(
    ("is_locked", "status"), [(True, "in-flight"), (None, "in-flight"), (False, "differs")]
)
def test_usages_of_nodes_change_under_the_lock(is_locked: bool | None, status: str) -> None:
    running = (task("free_huge_folio"),)
    taken = made(on_nodes={(B, 0, 1): HUGE}, running=running, is_locked=is_locked)
    assert {found for found, _ in judged(taken).values()} == {status}


def test_kernels_that_do_not_move_the_usage_of_a_node() -> None:
    assert NODES.why_not_kept(made()) is None
    reason = "this kernel does not move the usage of a node together with a huge page"
    assert NODES.why_not_kept(made(moves_usage=False)) == reason


# On images

OLD_AND_NEW = pytest.mark.parametrize(
    "kernel",
    ["7.3", *(pytest.param(name, marks=pytest.mark.long) for name in ("6.1", "6.12", "7.2"))],
)


def huge_pages(lab: Lab, kernel: str) -> GuestImage:
    return lab.image(kernel, "2", "hugetlbs")


def amounts(report: Report, identity: str) -> dict[tuple[str, int | None], int]:
    """Return what was found by path of the cgroup, and node, with descendants."""
    found: dict[tuple[str, int | None], int] = {}
    for row in report.rows:
        if row.identity != identity:
            continue
        path = row.item.partition("[")[2].removesuffix("]")
        while True:
            found[path, row.nid] = found.get((path, row.nid), 0) + row.found["hugetlb"] * PAGE
            if path == "/":
                break
            path = path.rpartition("/")[0] or "/"
    return found


@pytest.mark.image
@OLD_AND_NEW
def test_what_the_guest_says(lab: Lab, kernel: str) -> None:
    """Of /huge/gone, which was removed, its parent has the pages."""
    image = huge_pages(lab, kernel)
    report = image.report()
    assert report.verdict == "exact"
    said = in_all(
        {
            path_of(file, image.guest / which / "cgroup"): int(file.read_text())
            for file in (image.guest / which / "cgroup").rglob("hugetlb.2MB.current")
        }
        for which in COPIES
    )
    huge = PAGE * HUGE
    assert said == {"/huge": 8 * huge, "/huge/one": 2 * huge, "/huge/two": 4 * huge}
    found = amounts(report, "hugetlb_usage")
    assert {path: found[path, None] for path in said} == said
    assert found["/", None] == 9 * huge  # that of the leader, of which no file tells
    status = {i.name: i.status for i in report.identities}
    if series(kernel) in ("6.1", "7.2"):
        assert status["hugetlb_nodes"] == "not-kept"
        return
    on_nodes = in_all(
        {
            (path_of(file, image.guest / which / "cgroup"), int(word[1])): int(word[3:])
            for file in (image.guest / which / "cgroup").rglob("hugetlb.2MB.numa_stat")
            for word in file.read_text().split()[1:]
        }
        for which in COPIES
    )
    assert len(on_nodes) == 6
    found = amounts(report, "hugetlb_nodes")
    assert {key: found.get(key, 0) for key in on_nodes} == on_nodes


@pytest.mark.image
@pytest.mark.long
@pytest.mark.parametrize(
    ("freeze", "off_on_a_node"),
    [
        ("in:hugetlb_cgroup_uncharge_folio/page_counter_uncharge", True),
        ("in:alloc_hugetlb_folio/hugetlb_cgroup_commit_charge", False),
    ],
)
def test_a_guest_that_is_stopped_in_between(lab: Lab, freeze: str, off_on_a_node: bool) -> None:
    """The page refers to no cgroup anymore, or not yet; in the first case, under the lock."""
    report = lab.image("7.3", "2", "hugepages", freeze=freeze).report()
    assert report.verdict == "exact"
    found = {r.identity: (r.status, r.difference) for r in report.rows if r.status == "in-flight"}
    assert found["hugetlb_usage"] == ("in-flight", HUGE)
    assert found.get("hugetlb_nodes") == (("in-flight", HUGE) if off_on_a_node else None)


def owner_of_a_huge_page(image: Image, cgroup: int) -> int:
    """Return where a huge page refers to a cgroup, by reading all of its ``struct page``."""
    reader = HugetlbChargeReader(image)
    for piece in scan_pages(image):
        if piece.raw is None:
            continue
        for i in piece.raw.orders:
            one = piece.raw._replace(orders={i: piece.raw.orders[i]})
            if any(owner == cgroup for (owner, _, _), _ in reader.read(one)):
                size = mem_map(image).size
                data = piece.raw.data[i * size : (i + 4) * size]
                word = cgroup.to_bytes(8, "little")
                return piece.raw.page + i * size + data.index(word)
    raise AssertionError("no huge page refers to it")


@pytest.mark.image
@pytest.mark.parametrize("kernel", ["7.3", pytest.param("6.1", marks=pytest.mark.long)])
def test_a_huge_page_that_refers_to_another_cgroup(lab: Lab, kernel: str) -> None:
    prog = huge_pages(lab, kernel).own_program()
    subject = Subject(prog)
    cgroups = {c.path: c.address for c in subject.snapshot.hugetlb.cgroups.values() if c.is_online}
    at = owner_of_a_huge_page(subject.image, cgroups["/huge/two"])
    for other, name in ((cgroups["/huge/one"], "/huge/one"), (0xFFFF800012345678, None)):
        report = subject.audit(Fault((Write(at, other.to_bytes(8, "little")),), (), set()))
        name = name or f"{other:#x}"
        usage = {(f.item, f.difference) for f in report.findings if f.identity == "hugetlb_usage"}
        assert usage == {
            ("hugetlb.2MB.usage[/huge/two]", HUGE),
            (f"hugetlb.2MB.usage[{name}]", -HUGE),
        }
        [diagnosis] = report.diagnoses
        assert (diagnosis.cause, diagnosis.amount) == ("hugetlb-owner", HUGE)
