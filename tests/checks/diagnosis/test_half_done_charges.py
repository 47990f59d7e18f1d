# SPDX-License-Identifier: LGPL-2.1-or-later
"""What rows in flight have in common: one charge of one task, and the faults that look like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.made_kernel import MAIL, NODES, ROOT, SHOP, WEB, Kernel, busy

from memcg_inspect.checks.diagnosis import diagnose, half_done_charges
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Allowance, Held, Running
from memcg_inspect.report import Diagnosis

#: __memcg_slab_post_alloc_hook() has counted the object, and not yet set its owner.
FUNCTIONS = ("__memcg_slab_post_alloc_hook", "kmem_cache_alloc_noprof", "alloc_inode")
OBJECT = 0x9000
SIZE = 208
ITEM = "NR_SLAB_UNRECLAIMABLE_B"


def half_done(kernel: Kernel, memcg: int, *, cpu: int = 2) -> Running:
    """Let a CPU count an object and stop before the object has an owner."""
    objcg = kernel.objcg(memcg, NODES[0])
    kernel.slab(objcg, NODES[0], SIZE, "unreclaimable")
    kernel.refs[kernel.things.pop().payer] -= 1
    held = (
        Held("object", OBJECT + cpu, 0, NODES[0], SIZE, "unreclaimable"),
        Held("objcg", objcg, objcg),
    )
    return Running(cpu, 70 + cpu, "sh", FUNCTIONS, True, held)


def causes(kernel: Kernel, *running: Running) -> tuple[tuple[Diagnosis, ...], ...]:
    """Return the diagnoses, and the causes of rows in flight."""
    made = replace(kernel.snapshot(), running=running)
    judged = judge(made)
    findings = [pending.finding for pending in judged.findings]
    return diagnose(made, judged.rows, findings), half_done_charges(made, judged.rows)


def test_one_charge_is_one_cause_of_all_its_rows() -> None:
    kernel = busy(1)
    found, [charge] = causes(kernel, half_done(kernel, WEB))
    assert found == ()
    assert (charge.cause, charge.confidence, charge.findings) == ("half-done", "likely", ())
    assert (charge.memcgs, charge.nid, charge.amount, charge.unit) == (
        *((WEB,), NODES[0]),
        *(SIZE, "bytes"),
    )
    assert charge.what == (
        f"the charge of a slab object of memcg {WEB:#x} is half done: CPU 2 (sh, 72) was in "
        "__memcg_slab_post_alloc_hook()"
    )
    [shown] = charge.evidence
    assert (shown.address, shown.kind, shown.nid, shown.bytes) == (OBJECT + 2, "slab", 0, SIZE)
    assert (shown.objcg, shown.memcg, shown.note, charge.evidence_total) == (None, None, None, 1)
    assert charge.functions == ("__memcg_slab_post_alloc_hook",)
    # The counter of the memcg, those of its ancestors, and the bytes of the obj_cgroup.
    assert {(e.identity, e.memcg) for e in charge.signature} >= {
        ("slab", WEB),
        ("hierarchy", SHOP),
        ("objcg_bytes", WEB),
    }
    assert all(e.amount == e.difference for e in charge.signature)


def test_a_fault_that_does_the_same_is_named_beside_it() -> None:
    """An object without a reference may have been charged twice, too."""
    kernel = busy(1)
    _, [charge] = causes(kernel, half_done(kernel, WEB))
    [other] = charge.others
    assert "a slab object of 208 bytes" in other
    assert "charged twice" in other


@pytest.mark.parametrize(
    ("held", "what", "kind", "note"),
    [
        ("object", "a slab object", "slab", None),
        ("cache", "a slab object", "slab", "the cache of the object"),
        ("zswap", "a zswap entry", "zswap", None),
        ("percpu", "a percpu allocation", None, None),
        ("kmem", "a block of kernel memory", "kmem", None),
        ("folio", "a folio", "folio", None),
        ("batch", "pages that are uncharged together", "batch", None),
    ],
)
def test_each_kind_of_charge_has_a_name(
    held: Any, what: str, kind: str | None, note: str | None
) -> None:
    """As rows in flight show it, whichever identity these are of."""
    kernel = busy(1)
    objcg = kernel.objcg(WEB, 0)
    charge = Held(held, OBJECT, objcg, 1, SIZE, "")
    shown = Allowance(3, 7, "sh", "f", charge, WEB, SIZE, "bytes", "slab", 0, ITEM)
    made, keys = kernel.snapshot(), [("slab", WEB), ("usage", SHOP)]
    rows = [
        replace(
            make_row(RowKey(name, ITEM, "bytes", memcg, 0), {"found": 0}, {"folded": SIZE}),
            status="in-flight",
            allowance=shown,
        )
        for name, memcg in keys
    ]
    [found] = half_done_charges(made, rows)
    assert found.what == (
        f"the charge of {what} of memcg {WEB:#x} is half done: CPU 3 (sh, 7) was in f()"
    )
    assert (found.memcgs, found.nid, found.amount, found.unit) == ((WEB,), 1, SIZE, "bytes")
    assert [(e.kind, e.note) for e in found.evidence] == ([] if kind is None else [(kind, note)])
    assert {(e.objcg, e.memcg) for e in found.evidence} <= {(objcg, WEB)}
    assert (found.evidence_total, found.functions) == (1, ("f",))


def test_a_charge_in_advance_is_as_large_as_its_row() -> None:
    """try_charge_memcg() has charged a batch, and not put it into the stock."""
    kernel = busy(1)
    for memcg in (WEB, SHOP, ROOT):
        kernel.usage[memcg] += 64
    charging = Running(2, 72, "sh", ("try_charge_memcg", "charge_memcg", "do_fault"), True, ())
    charging = charging._replace(held=(Held("memcg", WEB, WEB),))
    found, [charge] = causes(kernel, charging)
    assert found == ()
    assert (charge.amount, charge.unit, charge.memcgs) == (64, "pages", (WEB,))
    assert charge.what.startswith(f"a charge in advance of memcg {WEB:#x} is half done")
    assert (charge.evidence, charge.evidence_total) == ((), None)


def test_two_cpus_are_two_causes() -> None:
    kernel = busy(1)
    found, charges = causes(kernel, half_done(kernel, WEB), half_done(kernel, MAIL, cpu=3))
    assert found == ()
    assert {charge.memcgs for charge in charges} == {(WEB,), (MAIL,)}
    assert {charge.what.split(": ")[1] for charge in charges} == {
        "CPU 2 (sh, 72) was in __memcg_slab_post_alloc_hook()",
        "CPU 3 (sh, 73) was in __memcg_slab_post_alloc_hook()",
    }


def test_a_task_that_waits_is_on_no_cpu() -> None:
    kernel = busy(1)
    waits = half_done(kernel, WEB)._replace(waiting=True, functions=(*FUNCTIONS, "schedule"))
    _, [charge] = causes(kernel, waits)
    assert "sh (72), which was not running, was in " in charge.what


def test_a_machine_at_rest_has_none() -> None:
    assert causes(busy(1)) == ((), ())


def test_a_fault_in_a_row_that_is_in_flight_too() -> None:
    """The other side of the fault is off by the fault and by what the CPU has half done."""
    kernel = busy(1)
    cpu = half_done(kernel, WEB)
    kernel.slab(kernel.objcg(WEB, NODES[0]), NODES[0], 1112, "unreclaimable")
    kernel.things[-1].payer = kernel.objcg(MAIL, NODES[1])
    [moved], [charge] = causes(kernel, cpu)
    assert (moved.cause, moved.memcgs, moved.amount) == ("object-owner", (WEB, MAIL), 1112)
    # The rows that show it may have any difference.
    assert moved.confidence == "likely"
    assert any("was not charged" in other for other in moved.others)
    assert charge.memcgs == (WEB,)


def test_a_row_in_flight_that_is_off_by_something_else_does_not_tell() -> None:
    kernel = busy(1)
    cpu = half_done(kernel, WEB)
    kernel.slab(kernel.objcg(WEB, NODES[0]), NODES[0], 1112, "unreclaimable")
    kernel.things[-1].payer = kernel.objcg(MAIL, NODES[1])
    kernel.cpu[WEB, "NR_SLAB_UNRECLAIMABLE_B", NODES[0]] += 24
    kernel.cpu[WEB, "NR_SLAB_UNRECLAIMABLE_B", None] += 24
    found, _ = causes(kernel, cpu)
    assert {d.cause for d in found} == {"not-counted"}
    assert {d.confidence for d in found} == {"likely"}


def test_the_charge_that_most_rows_show() -> None:
    """Rows of one task that name different objects are one cause."""
    kernel = busy(1)
    often, once = (Held("object", address, 0, 0, SIZE, "") for address in (0x9000, 0xA000))
    rows = []
    for name, held in (("slab", once), ("usage", often), ("kmem", often)):
        row = make_row(RowKey(name, ITEM, "bytes", WEB, 0), {"found": 0}, {"folded": SIZE})
        shown = Allowance(3, 7, "sh", name, held, WEB, 1, "pages", name, 0, ITEM)
        rows.append(replace(row, status="in-flight", allowance=shown))
    [found] = half_done_charges(kernel.snapshot(), rows)
    assert [evidence.address for evidence in found.evidence] == [often.address]
    assert len(found.signature) == 3
    # A row of pages is off by whole pages, of which the charge is a part.
    assert (found.amount, found.unit) == (SIZE, "bytes")
    assert found.what.endswith("was in usage()")
    assert found.functions == ("slab", "usage", "kmem")


def test_charges_that_more_rows_show_come_first() -> None:
    kernel, rows = busy(1), []
    held = Held("object", 0x9000, 0, 0, SIZE, "")
    for name, memcg, number in (("slab", WEB, 2), ("slab", MAIL, 3), ("usage", MAIL, 3)):
        row = make_row(RowKey(name, ITEM, "bytes", memcg, 0), {"found": 0}, {"folded": SIZE})
        shown = Allowance(number, 7, "sh", "f", held, memcg, SIZE, "bytes", name, 0, ITEM)
        rows.append(replace(row, status="in-flight", allowance=shown))
    found = half_done_charges(kernel.snapshot(), rows)
    assert [(d.memcgs, len(d.signature)) for d in found] == [((MAIL,), 2), ((WEB,), 1)]


def test_a_charge_that_only_rows_of_nodes_show() -> None:
    key = RowKey("node_slab", ITEM, "bytes", None, 0)
    row = make_row(key, {"found": 0}, {"folded": SIZE})
    held = Held("object", 0x9000, 0, 0, SIZE, "")
    shown = Allowance(3, 7, "sh", "f", held, None, SIZE, "bytes", "node_slab", 0, ITEM)
    rows = [replace(row, status="in-flight", allowance=shown)]
    [found] = half_done_charges(busy(1).snapshot(), rows)
    assert found.memcgs == ()
    assert found.what == "the charge of a slab object is half done: CPU 3 (sh, 7) was in f()"
