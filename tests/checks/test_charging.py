# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a stopped task must show for pages to be in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made import LIMITS, OBJCG_A, OBJCG_B, ROOT, A, B, snapshot
from support.made_charges import image

from memcg_inspect.checks.charging import judge_charging
from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.one_charge import judge_together
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Held, Running
from memcg_inspect.report import Row

PAGE = 4096
PAYER = Held("objcg", OBJCG_A, OBJCG_A)
OBJECT = Held("object", 0x5000, 0, 1, 200, "unreclaimable")
PERCPU = Held("percpu", 1280, bytes=7680)
BLOCK = Held("kmem", 0xE000, OBJCG_A, 1, PAGE, "unreclaimable")
FOLIO = Held("folio", 0xF000, 0, 1, PAGE)


def task(function: str, *held: Held, callers: tuple[str, ...] = (), cpu: int = 0) -> Running:
    functions = (function, *callers, "do_syscall_64", "entry_SYSCALL_64")
    return Running(cpu, 7 + cpu, "sh", functions, True, held)


def kmem(pages: int, memcg: int = A) -> Row:
    key = RowKey("kmem", "MEMCG_KMEM", "pages", memcg)
    return make_row(key, {"objects": 0}, {"folded": pages})


def usage(pages: int) -> Row:
    key = RowKey("usage", "memory.usage", "pages", A)
    return make_row(key, {"lru": 0}, {"page_counter": pages})


def whole_pages(difference: int) -> Row:
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", A, 0, OBJCG_A)
    return make_row(key, {"slab": 0}, {"whole_pages": difference})


def subtree(pages: int) -> Row:
    key = RowKey("hierarchy", "MEMCG_KMEM", "pages", ROOT)
    return make_row(key, {"subtree": 0}, {"folded": pages})


def judged(
    running: Running | tuple[Running, ...], *rows: Row, hugetlb: tuple[int, ...] = ()
) -> list[Row]:
    made = snapshot(running=(running,) if isinstance(running, Running) else running)
    made = replace(made, limits=LIMITS._replace(hugetlb=hugetlb))
    marked: list[Row] = []
    for identity in dict.fromkeys(row.identity for row in rows):
        marked += mark_in_flight(made, [row for row in rows if row.identity == identity])
    return judge_charging(made, judge_together(made, marked))


def statuses(running: Running | tuple[Running, ...], *rows: Row) -> list[str]:
    return [row.status for row in judged(running, *rows)]


@pytest.mark.parametrize("held", [OBJECT, BLOCK])
def test_a_task_that_charges(held: Held) -> None:
    """The rest of the page is not kept yet, or the page has no owner yet."""
    for function in ("__memcg_slab_post_alloc_hook", "obj_cgroup_charge_pages"):
        charging = task(function, held, PAYER)
        rows = (kmem(1), usage(1), whole_pages(0), subtree(1))
        assert statuses(charging, *rows) == ["in-flight", "in-flight", "exact", "in-flight"]


@pytest.mark.parametrize("held", [OBJECT, BLOCK])
def test_a_task_that_does_not_charge(held: Held) -> None:
    allocating = task("get_page_from_freelist", held, PAYER)
    found = judged(allocating, kmem(1), usage(1), whole_pages(0), subtree(1))
    assert [row.status for row in found] == ["unverifiable"] * 2 + ["exact", "unverifiable"]
    assert "sh (7) was in no function that makes such charges" in (found[0].reason or "")
    assert found[0].allowance is None


def test_kernel_memory_shows_in_both_counters() -> None:
    charging = task("obj_cgroup_charge_pages", BLOCK, PAYER)
    [row, _] = judged(charging, kmem(1), usage(0))
    assert row.status == "unverifiable"
    assert "memory.usage does not show it" in (row.reason or "")
    assert statuses(charging, kmem(0), usage(1)) == ["exact", "unverifiable"]
    # Each counter shows an amount that one large object can explain, but not the same one.
    large = Held("object", 0x5000, 0, 1, 2 * PAGE + 200, "unreclaimable")
    allocating = task("__memcg_slab_post_alloc_hook", large, PAYER)
    assert statuses(allocating, kmem(2), usage(3)) == ["unverifiable"] * 2
    assert statuses(allocating, kmem(3), usage(3)) == ["in-flight"] * 2
    # The root has no page counter to compare.
    assert statuses(charging, kmem(1, ROOT)) == ["in-flight"]


@pytest.mark.parametrize(
    "functions",
    [
        ("schedule_timeout", "__mem_cgroup_handle_over_high", "try_charge_memcg"),
        ("shrink_node", "mem_cgroup_handle_over_high", "try_charge_memcg"),
        ("page_counter_uncharge", "drain_stock", "refill_stock", "try_charge_memcg"),
        ("try_charge_memcg",),
        ("__mod_memcg_state",),
    ],
)
def test_a_task_that_has_changed_the_page_counter_only(functions: tuple[str, ...]) -> None:
    callers = (*functions[1:], "obj_cgroup_charge_pages", "__memcg_slab_post_alloc_hook")
    charging = task(functions[0], OBJECT, PAYER, callers=callers)
    assert statuses(charging, kmem(0), usage(1)) == ["exact", "in-flight"]


def test_a_task_that_has_changed_no_counter_yet() -> None:
    """What it charges is known, but not charged: it reclaims memory first."""
    callers = ("try_to_free_mem_cgroup_pages", "try_charge_memcg", "obj_cgroup_charge_pages")
    reclaiming = task("shrink_node", OBJECT, PAYER, callers=callers)
    assert statuses(reclaiming, kmem(0), usage(1)) == ["exact", "unverifiable"]
    # It sleeps after the page counter has changed, not before.
    callers = ("__mem_cgroup_handle_over_high", "try_charge_memcg", "obj_cgroup_charge_pages")
    sleeping = task("schedule_timeout", OBJECT, PAYER, callers=callers)
    assert statuses(sleeping, kmem(1), usage(0)) == ["unverifiable", "exact"]


def test_a_task_that_waits_does_not_charge() -> None:
    """Its stack has the name of a function that has returned."""
    stale = ("down_write", "do_syscall_64", "__memcg_slab_free_hook")
    rows = (kmem(1), usage(1), whole_pages(0))
    for callers, status in (
        (("schedule", "schedule_preempt_disabled", *stale), "unverifiable"),
        (("preempt_schedule_irq", "irqentry_exit", "obj_cgroup_charge_pages"), "in-flight"),
        (("schedule_rtlock", "rtlock_slowlock_locked", "refill_stock"), "in-flight"),
    ):
        waiting = task("__schedule", OBJECT, PAYER, callers=callers)._replace(waiting=True)
        assert statuses(waiting, *rows)[:2] == [status] * 2, callers
    callers = ("schedule", "schedule_timeout", "__mem_cgroup_handle_over_high", "try_charge_memcg")
    sleeping = task("__schedule", OBJECT, PAYER, callers=callers)._replace(waiting=True)
    assert statuses(sleeping, kmem(0), usage(1)) == ["exact", "in-flight"]


def test_a_task_sleeps_if_one_of_its_innermost_functions_is_schedule() -> None:
    """Further out, and on a CPU that runs, it is the name of a function that has returned."""
    rows, charging = (kmem(1), usage(1)), ("obj_cgroup_charge_pages",)
    for before, status in ((3, "unverifiable"), (4, "in-flight")):
        inner = [f"made_{n}" for n in range(before)]
        one = task("__switch_to", OBJECT, PAYER, callers=(*inner[1:], "schedule", *charging))
        assert statuses(one._replace(waiting=True), *rows) == [status] * 2
        assert statuses(one, *rows) == ["in-flight"] * 2


def test_another_task_that_points_to_pages_of_the_memcg() -> None:
    """Any task may point to a page. The one that charges made the charge."""
    others = task("get_page_from_freelist", BLOCK, PAYER)
    charging = task("xas_load", BLOCK, PAYER, callers=("charge_memcg",), cpu=1)
    for running in ((others, charging), (charging, others)):
        [row] = judged(running, usage(1))
        assert row.status == "in-flight"
        assert row.allowance is not None
        assert row.allowance.pid == 8


def test_user_pages_show_in_the_page_counter_only() -> None:
    charging = task("charge_memcg", FOLIO, PAYER)
    assert statuses(charging, kmem(0), usage(1)) == ["exact", "in-flight"]
    assert statuses(charging, kmem(1), usage(0)) == ["unverifiable", "exact"]
    assert statuses(task("folio_add_lru", FOLIO, PAYER), kmem(0), usage(1)) == (
        ["exact", "unverifiable"]
    )


def test_an_object_whose_owner_is_not_recorded() -> None:
    """It is charged. The obj_cgroup lacks its bytes, and what was found is rounded."""
    allocating = task("pcpu_alloc_area", OBJECT, PERCPU, PAYER)
    rest = PERCPU.bytes - 2 * PAGE
    rows = judged(allocating, kmem(2), usage(2), whole_pages(rest), subtree(2))
    assert [row.status for row in rows] == ["in-flight"] * 4
    assert all("1,280 bytes for each CPU" in (row.reason or "") for row in rows)
    # Not if the obj_cgroup lacks other bytes, not without it, and not another number of pages.
    others = (task("pcpu_alloc_area", PERCPU, PAYER), task("kfree", OBJECT, PAYER, cpu=1))
    assert statuses(others, kmem(2), usage(2), whole_pages(OBJECT.bytes)) == (
        ["unverifiable", "unverifiable", "in-flight"]
    )
    assert statuses(allocating, kmem(2), usage(2), whole_pages(0))[0] == "unverifiable"
    assert statuses(allocating, kmem(1), usage(1), whole_pages(rest))[0] == "unverifiable"
    # An object of whole pages is missing from nothing but the pages.
    page = Held("percpu", 1024, bytes=PAGE)
    found = judged(task("pcpu_alloc_area", OBJECT, page, PAYER), kmem(1), usage(1), whole_pages(0))
    assert [row.status for row in found] == ["in-flight", "in-flight", "exact"]
    assert [row.allowance and row.allowance.held for row in found[:2]] == [page] * 2


def test_the_same_amount_of_another_memcg() -> None:
    """Only a charge of a memcg below explains a row; one beside it does not."""
    charging = task("obj_cgroup_charge_pages", BLOCK, PAYER)
    allocating = task("get_page_from_freelist", Held("kmem", 0xE000, OBJCG_B, 1, PAGE), cpu=1)
    beside = allocating._replace(held=(*(allocating.held or ()), Held("objcg", OBJCG_B, OBJCG_B)))
    assert statuses((charging, beside), kmem(1), kmem(1, B)) == ["in-flight", "unverifiable"]


def test_a_charge_of_a_memcg_below_explains_what_the_page_counter_does_not_show() -> None:
    """That of the memcg below could not be read."""
    block, payer = Held("kmem", 0xF000, OBJCG_B, 1, PAGE), Held("objcg", OBJCG_B, OBJCG_B)
    charging = task("obj_cgroup_charge_pages", block, payer)
    above, below, _ = judged(charging, kmem(1), kmem(1, B), usage(0))
    assert (above.status, below.status) == ("in-flight", "in-flight")
    assert above.reason == below.reason
    assert below.allowance is not None
    assert (below.allowance.memcg, below.allowance.identity) == (B, "kmem")
    assert above.allowance == below.allowance._replace(memcg=A)
    assert statuses(charging, kmem(1), kmem(2, B), usage(0))[0] == "unverifiable"


def test_page_tables_have_functions_of_their_own() -> None:
    row = make_row(RowKey("pagetable", "NR_PAGETABLE", "pages", A, 1), {"table": 0}, {"folded": 1})
    for function, status in (
        ("pte_alloc_one", "in-flight"),
        ("___pte_free_tlb", "in-flight"),
        # pte_free() is inlined into do_fault(), and alloc_pte_page() makes kernel page tables.
        ("lruvec_stat_mod_folio", "in-flight"),
        ("__mod_lruvec_page_state", "in-flight"),
        ("get_page_from_freelist", "unverifiable"),
        ("__free_frozen_pages", "unverifiable"),
    ):
        assert statuses(task(function, BLOCK, PAYER), row) == [status], function
    # Something else is counted, by a function that has returned.
    inside = task("get_page_from_freelist", BLOCK, PAYER, callers=("lruvec_stat_mod_folio",))
    assert statuses(inside, row) == ["unverifiable"]


@pytest.mark.parametrize("pages", [512, 1 << 18])
def test_a_huge_page_is_charged_before_there_is_one(pages: int) -> None:
    """mem_cgroup_hugetlb_try_charge() has returned, and alloc_hugetlb_folio() looks for one."""
    looking = task("dequeue_hugetlb_folio_nodemask", PAYER, callers=("alloc_hugetlb_folio",))
    sizes = (512, 1 << 18)
    assert [row.status for row in judged(looking, usage(pages), hugetlb=sizes)] == ["in-flight"]
    assert [row.status for row in judged(looking, usage(pages - 1), hugetlb=sizes)] == (
        ["unverifiable"]
    )
    assert statuses(looking, usage(pages)) == ["differs"]
    elsewhere = task("clear_huge_page", PAYER)
    assert [row.status for row in judged(elsewhere, usage(pages), hugetlb=sizes)] == ["differs"]


def test_a_task_that_was_preempted_can_run() -> None:
    """Further out, its stack has the name of a function that has returned."""
    for function in ("preempt_schedule_irq", "__cond_resched", "schedule_rtlock"):
        callers = (function, "schedule", "obj_cgroup_charge_pages")
        waiting = task("__schedule", OBJECT, PAYER, callers=callers)._replace(waiting=True)
        assert statuses(waiting, kmem(1), usage(1)) == ["in-flight"] * 2, function


def test_a_task_that_reclaims_memory_for_a_charge() -> None:
    """try_charge_memcg() is not its innermost function: it has changed nothing yet."""
    callers = ("try_charge_memcg", "obj_cgroup_charge_pages")
    reclaiming = task("try_to_free_mem_cgroup_pages", OBJECT, PAYER, callers=callers)
    assert statuses(reclaiming, kmem(0), usage(1)) == ["exact", "unverifiable"]


def test_what_no_charge_explains_stays() -> None:
    """A row may be in flight for another reason, and one may differ by as much as a charge."""
    block, payer = BLOCK._replace(payer=OBJCG_B), Held("objcg", OBJCG_B, OBJCG_B)
    made = snapshot(running=(task("obj_cgroup_charge_pages", block, payer),))
    other = replace(kmem(1), status="in-flight", reason="an area is being freed")
    [below] = mark_in_flight(made, [kmem(1, B)])
    rows = [other, kmem(1), below]
    assert judge_charging(made, rows) == rows
    assert [row.status for row in rows] == ["in-flight", "differs", "in-flight"]


def test_a_row_in_flight_keeps_the_charge_of_its_own_memcg() -> None:
    charging = task("obj_cgroup_charge_pages", BLOCK, PAYER)
    other, payer = Held("kmem", 0xF000, OBJCG_B, 1, PAGE), Held("objcg", OBJCG_B, OBJCG_B)
    below = task("obj_cgroup_charge_pages", other, payer, cpu=1)
    rows = judged((charging, below), kmem(1, B), kmem(1))
    assert [row.allowance and row.allowance.held for row in rows] == [other, BLOCK]


def test_other_counters_that_differ_lack_no_bytes_of_an_object() -> None:
    allocating = task("pcpu_alloc_area", PERCPU, PAYER)
    sockets = make_row(RowKey("sock", "MEMCG_SOCK", "pages", A), {"sock": 0}, {"folded": 1})
    found = statuses(allocating, kmem(2), usage(2), whole_pages(0), sockets)
    assert found == ["unverifiable", "unverifiable", "exact", "differs"]


def test_the_page_counter_of_a_memcg_above_shows_no_charge() -> None:
    block, payer = BLOCK._replace(payer=OBJCG_B), Held("objcg", OBJCG_B, OBJCG_B)
    charging = task("obj_cgroup_charge_pages", block, payer)
    its_own = replace(usage(0), memcg=B)
    [row, _, _] = judged(charging, kmem(1, B), its_own, usage(1))
    assert row.status == "unverifiable"
    assert "memory.usage does not show it" in (row.reason or "")


def test_a_page_counter_that_is_off_by_more_may_show_the_charge() -> None:
    """What else it shows is not known."""
    charging = task("obj_cgroup_charge_pages", BLOCK, PAYER)
    assert statuses(charging, kmem(1), usage(2)) == ["in-flight", "unverifiable"]


def test_pages_that_are_uncharged_together() -> None:
    """Kernel memory is part of a batch, but not of a folio of user pages."""
    other = task("uncharge_folio", BLOCK, PAYER, cpu=1)
    for kind, status in (("batch", "in-flight"), ("folio", "unverifiable")):
        three = Held("batch" if kind == "batch" else "folio", 0xB000, 0, bytes=3 * PAGE)
        uncharging = task("uncharge_batch", three, PAYER)
        assert statuses((uncharging, other), kmem(-1), usage(-3)) == [status, "in-flight"]


def test_nodes_have_parts_of_a_charge() -> None:
    """The memcg itself has all of it."""
    large = Held("object", 0x5000, 0, 1, 2 * PAGE + 200, "unreclaimable")
    allocating = task("__memcg_slab_post_alloc_hook", large, PAYER)
    part = replace(kmem(2), item="NR_KMEM", nid=1)
    assert statuses(allocating, part, usage(3)) == ["in-flight"] * 2
    assert statuses(allocating, kmem(2), usage(3)) == ["unverifiable"] * 2


def test_a_reference_is_that_of_what_shows_it() -> None:
    """References are not of pages, so an object of a whole page explains them no better."""
    page = Held("percpu", 1024, bytes=PAGE)
    key = RowKey("references", "refcnt", "references", A, 0, OBJCG_A)
    row = make_row(key, {"slab": 0}, {"refcnt": 1})
    [row] = judged(task("obj_cgroup_charge", OBJECT, page, PAYER), row)
    assert row.allowance is not None
    assert row.allowance.held == OBJECT


def test_a_whole_image_is_judged_by_these_rules() -> None:
    sound = image()
    charging, allocating = (
        task(function, FOLIO, PAYER) for function in ("charge_memcg", "get_page_from_freelist")
    )
    for running, status in ((charging, "in-flight"), (allocating, "unverifiable")):
        usage = {**sound.usage, A: sound.usage[A] + 1}
        result = judge(replace(sound, usage=usage, running=(running,)))
        [row] = [r for r in result.rows if (r.identity, r.memcg) == ("usage", A)]
        assert row.status == status
    left_out = [each for each in result.identities if each.status == "not-kept"]
    assert {(each.rows, each.differing) for each in left_out} == {(0, 0)}
