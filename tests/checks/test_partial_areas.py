# SPDX-License-Identifier: LGPL-2.1-or-later
"""What vmalloc areas that are being freed explain: their pages, and no others."""

from __future__ import annotations

import pytest
from support.made import OBJCG_A, OBJCG_B, ROOT, A, B, snapshot

from memcg_inspect.checks import partial_areas
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Held, PagesOfArea, PartialArea, Running
from memcg_inspect.report import Row

FREEING = ("lruvec_stat_mod_folio", "vm_area_free_pages", "vfree", "bpf_map_free_deferred")
MAKING = ("__mod_memcg_state", "__vmalloc_node_range", "kvmalloc_node", "alloc_fdtable")
#: 6,000 pages of ``/a`` on node 0 and 4,000 on node 1. The task is at one of two pages.
AREA = PartialArea(
    0x5000,
    10_000,
    False,
    True,
    (PagesOfArea(OBJCG_A, 0, 6_000), PagesOfArea(OBJCG_A, 1, 4_000)),
    (0, 2_500, 7_000, 10_000),
)
#: Half a block of pages, which a task in vmalloc() may have left half done besides.
BLOCK = 1024


def off_by(
    pages: int, *tasks: Running, memcg: int | None = A, nid: int | None = 0, of: str = "vmalloc"
) -> Row:
    item = "NR_VMALLOC" if nid is not None else "MEMCG_VMALLOC"
    if memcg is None and nid is None:
        item = "nr_vmalloc_pages"
    place = "folded" if memcg is not None else "vm_stat"
    row = make_row(RowKey(of, item, "pages", memcg, nid), {"vmalloc": 0}, {place: pages})
    [judged] = mark_in_flight(snapshot(running=tasks), [row])
    return judged


def task(*areas: PartialArea, functions: tuple[str, ...] = FREEING, payer: int = A) -> Running:
    return Running(0, 7, "kworker", functions, True, (Held("memcg", payer, payer),), areas=areas)


def test_the_pages_that_are_still_counted() -> None:
    """By node, for a memcg, its ancestors and the node: those from where the task is."""
    one = task(AREA)
    for pages in (6_000, 3_500):
        assert off_by(pages, one).status == "in-flight"
        assert off_by(pages, one, memcg=None, of="node_vmalloc").status == "in-flight"
        assert off_by(pages, one, memcg=ROOT, of="hierarchy").status == "in-flight"
    for pages in (4_000, 3_000):
        assert off_by(pages, one, nid=1).status == "in-flight"
    for pages in (10_000, 7_500, 3_000):
        assert off_by(pages, one, nid=None).status == "in-flight"
    shown = off_by(3_500, one).reason
    assert shown is not None
    assert "0x5000" in shown
    assert "3,500 pages" in shown


def test_rows_of_other_counters_are_not_explained() -> None:
    key = RowKey("hierarchy", "NR_PAGETABLE", "pages", ROOT, 0)
    for pages in (3_500, 7_500, 10_000):
        row = make_row(key, {"table": 0}, {"folded": pages})
        [judged] = mark_in_flight(snapshot(running=[task(AREA)]), [row])
        assert judged.status == "differs"


@pytest.mark.parametrize("pages", [3_499, 3_501, -3_500])
def test_another_number_of_pages_is_not_explained(pages: int) -> None:
    assert off_by(pages, task(AREA)).status == "unverifiable"


def test_more_than_the_area_has_is_a_finding() -> None:
    assert off_by(6_000 + BLOCK, task(AREA)).status == "unverifiable"
    assert off_by(6_000 + BLOCK + 1, task(AREA)).status == "differs"
    assert off_by(-6_000 - BLOCK - 1, task(AREA)).status == "differs"


def test_each_area_explains_its_pages_once() -> None:
    other = AREA._replace(address=0x6000)
    assert off_by(9_500, task(AREA), task(other)).status == "in-flight"
    assert off_by(9_500, task(AREA)).status == "differs"
    # Only what adds to the row is named.
    reason = off_by(3_500, task(AREA), task(other._replace(stops=(0,)))).reason
    assert reason is not None
    assert "3,500 pages" in reason
    assert "0x6000" not in reason
    assert off_by(12_000 + 2 * BLOCK + 1, task(AREA), task(other)).status == "differs"


@pytest.mark.parametrize(("most", "status"), [(9, "in-flight"), (8, "unverifiable")])
def test_sums_of_too_many_areas_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, most: int, status: str
) -> None:
    """Two areas of three amounts each have nine sums."""
    monkeypatch.setattr(partial_areas, "_MOST_SUMS", most)
    left = (PagesOfArea(OBJCG_A, 0, 100),)
    other = AREA._replace(address=0x6000, nr_pages=100, left=left, stops=(0, 50, 100))
    assert off_by(6_050, task(AREA), task(other)).status == status


def test_areas_of_other_memcgs_explain_nothing() -> None:
    theirs = AREA._replace(left=(PagesOfArea(OBJCG_B, 0, 10_000),))
    assert off_by(7_500, task(theirs, payer=B), memcg=B).status == "in-flight"
    assert off_by(7_500, task(theirs, payer=B)).status == "differs"
    nobody = AREA._replace(left=(PagesOfArea(0, 0, 10_000),))
    assert off_by(7_500, task(nobody)).status == "differs"
    assert off_by(7_500, task(nobody), memcg=None, of="node_vmalloc").status == "in-flight"


def test_only_tasks_in_vfree_explain() -> None:
    """A pointer to an area can be left over on any stack."""
    for functions in (("sys_read", "do_syscall_64", "entry_SYSCALL_64"), MAKING):
        assert off_by(3_500, task(AREA, functions=functions)).status == "differs"
    put = AREA._replace(is_counted=False)
    assert off_by(3_500, task(put)).status == "differs"


def test_pages_that_are_not_counted_yet() -> None:
    """Up to 7.0, __vmalloc_area_node() counts the pages of an area when it has all of them."""
    made = task(AREA._replace(is_linked=True), functions=MAKING)
    assert off_by(-7_500, made, nid=None).status == "in-flight"
    assert off_by(7_500, made, nid=None).status == "unverifiable"
    freed = task(AREA._replace(is_linked=True))
    assert off_by(-7_500, freed, nid=None).status == "differs"


def test_the_counter_of_all_nodes_has_all_pages_or_none() -> None:
    one = task(AREA)
    assert off_by(10_000, one, memcg=None, nid=None, of="node_vmalloc").status == "in-flight"
    assert off_by(7_500, one, memcg=None, nid=None, of="node_vmalloc").status == "unverifiable"
    two = (one, task(AREA._replace(address=0x6000)))
    for pages in (10_000, 20_000):
        row = off_by(pages, *two, memcg=None, nid=None, of="node_vmalloc")
        assert row.status == "in-flight"


def test_the_reason_says_who_and_where() -> None:
    one = task(AREA)
    for found, who in ((one, "CPU 0 (kworker, 7)"), (one._replace(waiting=True), "kworker (7)")):
        reason = off_by(3_500, found).reason or ""
        assert reason.startswith(f"{who} frees the vmalloc area 0x5000, and 3,500 pages")


def test_areas_on_a_stack_add_no_payer_to_other_counters() -> None:
    theirs = AREA._replace(left=(PagesOfArea(OBJCG_B, 0, 10_000),))
    one = task(theirs, functions=("pagetable_pte_dtor", "vfree", "do_syscall_64"))
    for memcg, status in ((A, "unverifiable"), (B, "differs")):
        assert off_by(1, one, memcg=memcg, of="pagetable").status == status
    # It may have left another page of the area half done.
    assert off_by(1, task(theirs), memcg=B).status == "unverifiable"


def test_areas_do_not_tell_who_pays_for_what_a_stack_does_not_show() -> None:
    """The stack points to no memcg, so the task may have charged any."""
    for held in ((), (Held("object", 0x9000, 0, 0, 64),)):
        one = task(AREA)._replace(held=held)
        assert off_by(5, one, memcg=B).status == "unverifiable"
