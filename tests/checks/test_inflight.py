# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a CPU that stopped in the middle of a charge may explain: its charge, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made import LIMITS, OBJCG_A, OBJCG_B, ROOT, UNRECLAIMABLE, A, B, snapshot
from support.made_charges import image

from memcg_inspect.checks.half_done import name_of
from memcg_inspect.checks.identities.usage import usage_rows
from memcg_inspect.checks.inflight import mark_in_flight, possible_contexts
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import NUMA_NO_NODE, ChargeStock, Held, Objcg, ObjcgSet, Running, Unit
from memcg_inspect.report import Row

FREEING = ("lru_gen_add_folio", "folio_batch_move_lru", "exit_mmap")
SLAB = ("__memcg_slab_post_alloc_hook", "kmem_cache_alloc_noprof", "alloc_inode")
PAGE = 4096
#: Another child of ``/a``.
C = 0x3100
#: A slab object of 200 bytes on node 1 that nobody pays for yet, and who may pay for it.
OBJECT = Held("object", 0x5000, 0, 1, 200, "unreclaimable")
PAYER_A, PAYER_B = Held("objcg", OBJCG_A, OBJCG_A), Held("objcg", OBJCG_B, OBJCG_B)


def off_by(pages: int, *cpus: Running, memcg: int = A) -> Row:
    """The row of a memcg of which the page counter is off by so many pages."""
    sound = image()
    made = replace(sound, usage={**sound.usage, memcg: sound.usage[memcg] + pages}, running=cpus)
    [row] = [row for row in mark_in_flight(made, usage_rows(made)) if row.memcg == memcg]
    return row


def cpu(
    number: int, functions: tuple[str, ...], held: tuple[Held, ...] | None, busy: bool = True
) -> Running:
    return Running(number, 7, "sh", functions, busy, held)


def folio(pages: int, payer: int = A) -> tuple[Held, ...]:
    """A folio that nobody pays for yet, and the memcg that will."""
    return (Held("folio", 0xE000, 0, 0, pages * PAGE), Held("memcg", payer, payer))


def slab(difference: int, memcg: int = A, nid: int = 1, item: str = UNRECLAIMABLE) -> Row:
    return make_row(RowKey("slab", item, "bytes", memcg, nid), {"slab": 0}, {"folded": difference})


def judged(*rows: Row, running: tuple[Running, ...], **more: object) -> list[str]:
    return [row.status for row in mark_in_flight(snapshot(running=running, **more), rows)]


def test_the_very_amount_of_what_the_stack_points_to() -> None:
    one = cpu(0, FREEING, folio(8))
    for sign in (1, -1):
        assert off_by(sign * 8, one).status == "in-flight"
        assert off_by(sign * 9, one).status == "unverifiable"
        assert off_by(sign * (64 + 31 + 8 + 1), one).status == "differs"


def test_a_charge_in_advance() -> None:
    assert off_by(LIMITS.charge_batch, cpu(0, FREEING, folio(8))).status == "in-flight"


def test_what_is_in_the_stock_of_the_cpu() -> None:
    """drain_stock() uncharges the pages before it empties the slot."""
    row = make_row(RowKey("usage", "memory.usage", "pages", A), {"stock": 37}, {"page_counter": 0})
    draining = cpu(1, ("drain_stock", "refill_stock", "try_charge_memcg"), (Held("memcg", A, A),))
    stocks = [ChargeStock(1, A, 37)]
    assert judged(row, running=(draining,), charge_stocks=stocks) == ["in-flight"]
    elsewhere = [ChargeStock(0, A, 37)]
    assert judged(row, running=(draining,), charge_stocks=elsewhere) == ["unverifiable"]


@pytest.mark.parametrize("pages", [1, 64, 10_000])
def test_memcgs_that_the_cpu_does_not_point_to(pages: int) -> None:
    """A fault elsewhere is found while a CPU charges another memcg."""
    one = cpu(0, FREEING, folio(pages, B))
    assert off_by(pages, one, memcg=B).status == "in-flight"
    busy = cpu(0, SLAB, (OBJECT, PAYER_A))
    assert judged(slab(pages, memcg=B), running=(busy,)) == ["differs"]


def test_the_memcg_node_item_and_amount_of_an_object() -> None:
    busy = (cpu(0, SLAB, (OBJECT, PAYER_A)),)
    assert judged(slab(200), running=busy) == ["in-flight"]
    assert judged(slab(-200), running=busy) == ["in-flight"]
    for other in (slab(201), slab(1), slab(200, nid=0), slab(200, item="NR_SLAB_RECLAIMABLE_B")):
        assert judged(other, running=busy) == ["unverifiable"]
    # The counter of an ancestor less those of its children.
    assert judged(slab(-200, memcg=ROOT), running=busy) == ["in-flight"]


def test_only_what_nobody_pays_for_is_half_done() -> None:
    """The stack must point to the obj_cgroup, too. An object that has an owner is charged."""
    assert judged(slab(200), running=(cpu(0, SLAB, (OBJECT,)),)) == ["unverifiable"]
    charged = cpu(0, SLAB, (OBJECT._replace(payer=OBJCG_A), PAYER_A))
    assert judged(slab(200), running=(charged,)) == ["unverifiable"]


def test_a_slab_object_is_no_page_of_a_vmalloc_area() -> None:
    """Only identities in which whole pages are charged for objects accept objects as evidence."""
    row = make_row(
        RowKey("node_vmalloc", "NR_VMALLOC", "pages", None, 1), {"vmalloc": 0}, {"vm_stat": 1}
    )
    functions = ("mod_node_page_state", "vm_area_alloc_pages")
    page = Held("kmem", 0xE000, 0, 1, PAGE, "unreclaimable")
    assert judged(row, running=(cpu(0, functions, (OBJECT, PAYER_A)),)) == ["unverifiable"]
    assert judged(row, running=(cpu(0, functions, (page, PAYER_A)),)) == ["in-flight"]


def test_a_task_charges_one_entry_of_zswap_at_a_time() -> None:
    """In bytes, an entry is as large as a page; but it is one entry."""
    storing = cpu(0, ("obj_cgroup_charge_zswap", "zswap_store", "swap_writeout"), (PAYER_A,))
    for item, off, status in (
        ("MEMCG_ZSWAP_B", PAGE, "unverifiable"),
        ("MEMCG_ZSWAP_B", PAGE + 1, "differs"),
        ("MEMCG_ZSWAPPED", 1, "unverifiable"),
        ("MEMCG_ZSWAPPED", 2, "differs"),
        ("MEMCG_ZSWAP_INCOMP", -2, "differs"),
    ):
        unit: Unit = "bytes" if item.endswith("_B") else "pages"
        row = make_row(RowKey("zswap", item, unit, A), {"zswap": 0}, {"folded": off})
        assert judged(row, running=(storing,)) == [status], (item, off)


def test_the_very_entry_of_zswap_that_is_stored() -> None:
    entry = Held("zswap", 0x7000, 0, NUMA_NO_NODE, 900, "compressed")
    storing = cpu(0, ("obj_cgroup_charge_zswap", "zswap_store"), (PAYER_A, entry))
    for item, off, status in (
        ("MEMCG_ZSWAP_B", 900, "in-flight"),
        ("MEMCG_ZSWAP_B", 899, "unverifiable"),
        ("MEMCG_ZSWAP_B", 901, "differs"),
        ("MEMCG_ZSWAPPED", 1, "in-flight"),
        ("MEMCG_ZSWAP_INCOMP", 1, "unverifiable"),
    ):
        unit: Unit = "bytes" if item.endswith("_B") else "pages"
        row = make_row(RowKey("zswap", item, unit, A), {"zswap": 0}, {"folded": off})
        assert judged(row, running=(storing,)) == [status], (item, off)
    # One that is freed has its owner to the end. It is no charge of another memcg.
    freeing = cpu(0, ("zswap_entry_free", "swap_load"), (entry._replace(payer=OBJCG_A), PAYER_B))
    for memcg, status in ((A, "in-flight"), (B, "unverifiable")):
        key = RowKey("zswap", "MEMCG_ZSWAP_B", "bytes", memcg)
        row = make_row(key, {"zswap": 0}, {"folded": -900})
        assert judged(row, running=(freeing,)) == [status]


def test_references_of_a_page_that_is_stored_in_zswap() -> None:
    entry = Held("zswap", 0x7000, 0, NUMA_NO_NODE, 900, "compressed")
    gone = entry._replace(address=0x8000)
    functions = ("obj_cgroup_charge_zswap", "zswap_store", "swap_writeout")
    storing = cpu(0, functions, (PAYER_A, entry, gone))
    key = RowKey("references", "refcnt", "references", A, 0, OBJCG_A)
    for off, reason in ((2, "of CPU 0 (sh, 7), in zswap_store, with zswap entry 0x7000"), (3, "")):
        row = make_row(key, {"zswap": 5}, {"refcnt": 5 + off})
        made = snapshot(running=(storing,), unlisted_zswap=(entry.address,))
        [found] = mark_in_flight(made, [row])
        assert (found.status == "in-flight") == bool(reason)
        assert reason in (found.reason or "")
    other = make_row(key._replace(memcg=B, objcg=OBJCG_B), {"zswap": 5}, {"refcnt": 7})
    assert judged(other, running=(storing,), unlisted_zswap=(entry.address,)) == ["differs"]


def test_a_charge_is_used_once() -> None:
    """It shows in the rows of its memcg and of an ancestor, with one amount, and in no others."""
    other = OBJECT._replace(address=0x6000, bytes=104)
    busy = (cpu(0, SLAB, (OBJECT, PAYER_A, other, PAYER_B)),)
    assert judged(slab(200), slab(-200, memcg=ROOT), running=busy) == ["in-flight"] * 2
    assert judged(slab(200), slab(104, memcg=B), running=busy) == ["in-flight", "unverifiable"]
    assert judged(slab(200), slab(200, memcg=ROOT), slab(104, memcg=B), running=busy) == (
        ["differs"] * 3
    )


def usage(memcg: int, pages: int) -> Row:
    key = RowKey("usage", "memory.usage", "pages", memcg)
    return make_row(key, {"lru": 0}, {"page_counter": pages})


def test_a_fault_in_a_child_is_no_charge_of_the_parent() -> None:
    """The counter of the child is subtracted from that of its parent: both rows are off by it."""
    one = cpu(0, FREEING, folio(3, A))
    assert judged(usage(A, -3), running=(one,)) == ["in-flight"]
    assert judged(usage(B, 3), usage(A, -3), running=(one,)) == ["differs"] * 2
    assert judged(usage(B, 4), usage(A, -3), running=(one,)) == ["differs", "in-flight"]


def test_an_ancestor_of_several_half_done_charges() -> None:
    """Two CPUs have charged a memcg each, and not yet their parent."""
    other = replace(snapshot().memcgs[B], address=C, path="/a/c", payer=C)
    memcgs = {**snapshot().memcgs, C: other}
    two = (cpu(0, FREEING, folio(3, B)), cpu(1, FREEING, folio(64, C)))
    rows = (usage(B, 3), usage(C, 64), usage(A, -67))
    assert judged(*rows, running=two, memcgs=memcgs) == ["in-flight"] * 3
    rows = (usage(B, 3), usage(C, 64), usage(A, -66))
    assert judged(*rows, running=two, memcgs=memcgs) == ["in-flight"] * 2 + ["unverifiable"]
    # The stack of one of them does not show its charge. Nobody knows that of the parent, then.
    rows = (usage(B, 3), usage(C, 70), usage(A, -73))
    assert judged(*rows, running=two, memcgs=memcgs) == ["in-flight"] + ["unverifiable"] * 2
    rows = (usage(B, 4), usage(C, 64), usage(A, -68))
    assert judged(*rows, running=two, memcgs=memcgs) == (
        ["unverifiable", "in-flight", "unverifiable"]
    )


def test_the_allowance_of_an_ancestor_is_its_own_amount() -> None:
    other = replace(snapshot().memcgs[B], address=C, path="/a/c", payer=C)
    taken = snapshot(
        memcgs={**snapshot().memcgs, C: other},
        running=(cpu(0, FREEING, folio(3, B)), cpu(1, FREEING, folio(64, C))),
    )
    *below, above = mark_in_flight(taken, (usage(B, 3), usage(C, 64), usage(A, -67)))
    assert above.allowance is not None
    assert (above.allowance.memcg, above.allowance.amount) == (A, -67)
    assert above.allowance.cpu == 0  # the first of them
    assert above.reason == "; ".join(row.reason or "" for row in below)
    assert above.reason.count("half-done charge of folio 0xe000") == 2


def test_several_rows_off_by_one_page_each_without_partners() -> None:
    rows = [usage(memcg, 1) for memcg in (A, B, A)]
    one = cpu(0, FREEING, (*folio(1), *folio(1, B)))
    assert judged(*rows, running=(one,)) == ["differs"] * 3


def test_whole_pages_of_an_obj_cgroup() -> None:
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", A, 0, OBJCG_A)
    busy = (cpu(0, SLAB, (OBJECT._replace(bytes=9032), PAYER_A)),)

    def status(off: int, objcg: int = OBJCG_A) -> list[str]:
        row = make_row(key._replace(objcg=objcg), {"slab": 0}, {"whole_pages": off})
        return judged(row, running=busy)

    assert status(9032 - 2 * PAGE) == ["in-flight"]
    assert status(-(9032 - 2 * PAGE)) == ["in-flight"]
    assert status(24) == ["unverifiable"]
    assert status(9032 - 2 * PAGE, OBJCG_B) == ["differs"]
    assert status(PAGE) == ["differs"]  # never more than half a page


def test_counters_of_nodes_have_no_memcg() -> None:
    def node(nid: int, pages: int) -> Row:
        return make_row(
            RowKey("node_pagetable", "NR_PAGETABLE", "pages", None, nid), {"x": 0}, {"y": pages}
        )

    table = Held("kmem", 0xE000, OBJCG_A, 1, PAGE, "unreclaimable")
    busy = (cpu(0, ("free_frozen_pages", "pagetable_free", "free_pgtables"), (table,)),)
    assert judged(node(1, -1), running=busy) == ["in-flight"]
    assert judged(node(0, -1), running=busy) == ["unverifiable"]
    nowhere = (busy[0]._replace(held=(table._replace(nid=NUMA_NO_NODE), *busy[0].held[:0])),)
    assert judged(node(0, -2), running=nowhere) == ["unverifiable"]


def test_cpus_that_make_no_such_charges_explain_nothing() -> None:
    waiting = cpu(0, ("osq_lock", "do_unlinkat", "rwsem_down_write_slowpath"), folio(1))
    assert off_by(1, waiting).status == "differs"
    assert off_by(1, cpu(0, FREEING, folio(1), busy=False)).status == "differs"
    assert off_by(1).status == "differs"


def test_a_stack_that_is_not_in_the_image_may_have_held_anything() -> None:
    """Up to a batch of the largest folios, a row is unverifiable: never exact, no finding."""
    most = 64 + 31 + LIMITS.folio_batch * LIMITS.block
    assert off_by(most, cpu(0, (), None)).status == "unverifiable"
    assert off_by(most + 1, cpu(0, (), None)).status == "differs"


def test_the_reason_names_the_cpu_and_its_charge() -> None:
    row = off_by(8, cpu(3, FREEING, folio(8)))
    where = "CPU 3 (sh, 7), in lru_gen_add_folio"
    assert row.reason == f"half-done charge of folio 0xe000 (32,768 bytes) by {where}"
    assert row.allowance is not None
    assert row.allowance[:5] == (3, 7, "sh", "lru_gen_add_folio", folio(8)[0])
    assert (row.allowance.memcg, row.allowance.amount, row.allowance.unit) == (A, 8, "pages")
    row = off_by(9, cpu(3, FREEING, folio(8)))
    assert row.reason is not None
    assert row.reason.endswith(f"at most 103 pages of {where}")
    assert row.allowance is None


def test_the_cpu_that_was_closest_to_the_charge_is_named() -> None:
    """Both show it. One has gone on from there."""
    gone_on = cpu(0, ("osq_lock", "mutex_lock", *FREEING), folio(8))
    closest = cpu(2, (*FREEING, "mmput", "do_exit", "do_group_exit"), folio(8))
    row = off_by(8, gone_on, closest)
    assert row.allowance is not None
    assert (row.allowance.cpu, row.allowance.function) == (2, FREEING[0])


def test_a_reason_says_where_the_cpus_may_have_been() -> None:
    row = off_by(1, cpu(0, ("osq_lock",), None), cpu(1, (), None))
    assert row.status == "unverifiable"
    assert row.reason is not None
    head, places = row.reason.split(": ", 1)
    assert head == "a charge may be half done, but no stack shows this amount"
    assert [place.split(" of ", 1)[1] for place in places.split("; ")] == [
        "CPU 0 (sh, 7), in osq_lock",
        "CPU 1 (sh, 7), in an unknown place",
    ]
    row = off_by(1, *(cpu(n, (), None) for n in range(7)))
    assert row.reason is not None
    assert row.reason.count("at most") == 4
    assert row.reason.endswith("; and 3 more")
    waiting = cpu(3, FREEING, folio(8))._replace(waiting=True)
    row = off_by(8, waiting)
    assert row.reason == (
        "half-done charge of folio 0xe000 (32,768 bytes) by sh (7), which was not running, in "
        "lru_gen_add_folio"
    )


def test_a_reason_says_who_cannot_be_read() -> None:
    unknown = Running(-1, -1, "?", (), True)
    assert name_of(unknown._replace(cpu=3)) == "CPU 3"
    row = off_by(1, unknown._replace(waiting=True))
    assert row.status == "unverifiable"
    assert row.reason is not None
    assert row.reason.endswith(" of a task that cannot be read, in an unknown place")


def test_a_reason_names_what_is_charged() -> None:
    [row] = mark_in_flight(snapshot(running=(cpu(0, SLAB, (OBJECT, PAYER_A)),)), [slab(200)])
    where = f"CPU 0 (sh, 7), in {SLAB[0]}"
    assert row.reason == f"half-done charge of slab object 0x5000 (200 bytes) by {where}"
    key = RowKey("percpu", "MEMCG_PERCPU_B", "bytes", A)
    row = make_row(key, {"data": 0}, {"folded": 1000})
    allocating = cpu(
        0, ("pcpu_alloc_noprof", "alloc_mem"), (Held("percpu", 250, bytes=1000), PAYER_A)
    )
    [row] = mark_in_flight(snapshot(running=(allocating,)), [row])
    assert row.reason is not None
    assert "a percpu allocation of 250 bytes for each CPU" in row.reason
    row = off_by(LIMITS.charge_batch, cpu(0, FREEING, folio(8)))
    assert row.reason is not None
    assert row.reason.startswith("half-done charge of a charge in advance by CPU 0")


def test_rows_that_fewer_cpus_explain_come_first() -> None:
    """The other CPU cannot explain what is off by 104."""
    small = OBJECT._replace(address=0x6000, nid=0, bytes=104)
    two = (cpu(0, SLAB, (OBJECT, small, PAYER_A)), cpu(1, SLAB, (OBJECT, PAYER_A)))
    assert judged(slab(200), slab(104, nid=0), running=two) == ["in-flight"] * 2


def test_no_more_rows_than_one_charge_shows_in() -> None:
    """Another CPU may have charged as much, but its stack does not show it."""
    two = (cpu(0, SLAB, (OBJECT, PAYER_B)), cpu(1, SLAB, (PAYER_B,)))
    rows = (slab(200, B), slab(-200, A), slab(200, ROOT))
    assert judged(*rows, running=two) == ["in-flight", "in-flight", "unverifiable"]


def test_one_charge_does_not_show_in_memcgs_beside_each_other() -> None:
    other = replace(snapshot().memcgs[B], address=C, path="/a/c", payer=C)
    memcgs = {**snapshot().memcgs, C: other}
    one = cpu(0, SLAB, (OBJECT, PAYER_B, Held("memcg", C, C)))
    rows = (slab(200, B), slab(200, C))
    assert judged(*rows, running=(one,), memcgs=memcgs) == ["in-flight", "unverifiable"]


def test_a_row_keeps_the_charge_that_its_own_task_shows() -> None:
    """It is no sum of charges below it, although the one below is off by as much."""
    two = (cpu(1, SLAB, (OBJECT, PAYER_A)), cpu(0, SLAB, (OBJECT, PAYER_B)))
    rows = mark_in_flight(snapshot(running=two), [slab(200, B), slab(-200)])
    assert [row.allowance and row.allowance.cpu for row in rows] == [0, 1]


def test_what_somebody_pays_for_says_more() -> None:
    free = Held("folio", 0xF000, 0, 1, PAGE)
    paid = Held("kmem", 0xE000, OBJCG_A, 1, PAGE)
    row = off_by(1, cpu(0, ("obj_cgroup_charge_pages", *FREEING), (free, paid, PAYER_A)))
    assert row.allowance is not None
    assert row.allowance.held == paid


def test_an_entry_of_zswap_has_one_obj_cgroup() -> None:
    """Bytes of the other one were not charged for it."""
    entry = Held("zswap", 0x7000, OBJCG_A, NUMA_NO_NODE, 900, "compressed")
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", A, 0, OBJCG_A)
    row = make_row(key, {"zswap": 0}, {"whole_pages": 900})
    freeing = snapshot(running=(cpu(0, ("zswap_entry_free", *FREEING), (entry, PAYER_B)),))
    [found] = mark_in_flight(freeing, [row])
    assert found.status == "in-flight"
    assert "of zswap entry 0x7000 (900 bytes) by" in (found.reason or "")
    other = make_row(key._replace(memcg=B, objcg=OBJCG_B), {"zswap": 0}, {"whole_pages": 900})
    assert [row.status for row in mark_in_flight(freeing, [other])] == ["unverifiable"]


@pytest.mark.parametrize(
    ("function", "status"),
    [("pcpu_alloc_noprof", "unverifiable"), ("obj_cgroup_charge", "differs")],
)
def test_obj_cgroups_of_one_set(function: str, status: str) -> None:
    """A percpu allocation is charged to those of several nodes, of which one is on the stack."""
    objcgs = {
        address: Objcg(address, A, nid, False, 0, set=0x9000)
        for address, nid in ((OBJCG_A, 0), (0xA1, 1))
    }
    key = RowKey("objcg_bytes", "bytes of whole pages", "bytes", A, 1, 0xA1)
    row = make_row(key, {"percpu": 0}, {"whole_pages": 8})
    sets = {0x9000: ObjcgSet(0x9000, 3, {0: OBJCG_A, 1: 0xA1, 2: 0})}
    one = cpu(0, (function, "do_syscall_64", "entry_SYSCALL_64"), (PAYER_A,))
    assert judged(row, running=(one,), objcgs=objcgs, objcg_sets=sets) == [status]


def test_no_cpu_leaves_half_done_what_is_changed_at_once() -> None:
    row = make_row(RowKey("placement", "ITEM", "pages", A), {"x": 0}, {"y": 1})
    assert possible_contexts(snapshot(running=(cpu(0, (), None),)), row) == []


def test_two_tasks_that_store_a_page_in_zswap() -> None:
    """Both point to one entry, which holds one reference. One of them does not run."""
    entry = Held("zswap", 0x7000, 0, NUMA_NO_NODE, 900, "compressed")
    functions = ("obj_cgroup_charge_zswap", "zswap_store", "swap_writeout")
    one, other = cpu(0, functions, (PAYER_A, entry)), cpu(1, functions, (PAYER_A, entry))
    two = (one, other._replace(waiting=True))
    key = RowKey("references", "refcnt", "references", A, 0, OBJCG_A)
    made = snapshot(running=two, unlisted_zswap=(entry.address,))
    for off in (1, 2, 3):
        [row] = mark_in_flight(made, [make_row(key, {"zswap": 5}, {"refcnt": 5 + off})])
        assert row.status == "in-flight"
        assert row.reason == (
            "at most 2 references of CPU 0 (sh, 7), in zswap_store, with zswap entry 0x7000; "
            "at most 1 reference of sh (7), in zswap_store"
        )
    [row] = mark_in_flight(made, [make_row(key, {"zswap": 5}, {"refcnt": 9})])
    assert "at most 2 references" not in (row.reason or "")
