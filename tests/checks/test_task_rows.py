# SPDX-License-Identifier: LGPL-2.1-or-later
"""What tasks charge, and stacks that wait for a task, on snapshots made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from support.made import DEAD, OBJCG_A, OBJCG_B, ROOT, A, B
from support.made_charges import image

from memcg_inspect.checks.identities.active_memcg import active_memcg_rows
from memcg_inspect.checks.identities.cached_stacks import cached_stack_rows
from memcg_inspect.checks.identities.task_objcg import task_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.model import Coverage, Objcg
from memcg_inspect.model_tasks import ActiveMemcg, CachedStackPage, TaskCharge
from memcg_inspect.report import Evidence, Finding


def task(memcg: int, objcg: int) -> TaskCharge:
    return TaskCharge(0x7000, 7, "sh", memcg, (objcg,), False, True)


def test_states_of_a_task_that_last_a_moment() -> None:
    """A migrating task has another memcg's obj_cgroup, and a running one may have none."""
    for late, right in (
        (task(A, OBJCG_B)._replace(is_migrating=True), True),
        (task(A, 0)._replace(is_runnable=True), True),
        (task(A, OBJCG_B)._replace(is_runnable=True), False),
    ):
        [row] = task_rows(image(tasks=[late]))
        assert row.status == ("exact" if right else "differs")


def test_a_task_without_an_obj_cgroup() -> None:
    """That is legal if nothing but the root has one, as with ``cgroup.memory=nokmem``."""
    roots = Objcg(0xE0, ROOT, 0, False, 0)
    for objcgs, right in (
        ({}, True),
        ({roots.address: roots}, True),
        ({roots.address: roots, OBJCG_B: Objcg(OBJCG_B, B, 0, False, 0)}, False),
    ):
        [row] = task_rows(image(tasks=[task(A, 0)], objcgs=objcgs, references={}))
        assert row.status == ("exact" if right else "differs")


def test_tasks_are_counted_by_memcg() -> None:
    tasks = [task(A, OBJCG_A), task(A, OBJCG_A), task(B, OBJCG_B), task(A, OBJCG_B)]
    found = {row.memcg: (row.found, row.claimed) for row in task_rows(image(tasks=tasks))}
    assert found == {
        A: ({"tasks": 2}, {"tasks": 3}),
        B: ({"tasks": 1}, {"tasks": 1}),
    }


ACTIVE = ActiveMemcg(B, "sh (7)", 0x7000, A, "folio_alloc_buffers", None)


@pytest.mark.parametrize(
    ("active", "status"),
    [
        (ACTIVE, "exact"),
        (ACTIVE._replace(memcg=DEAD), "exact"),
        (ACTIVE._replace(function=None), "differs"),
        (ACTIVE._replace(function=None, why_unknown="it ran"), "unverifiable"),
        # A freed memcg is a fault, whatever the stack shows.
        (ACTIVE._replace(memcg=0xBAD), "differs"),
        (ACTIVE._replace(memcg=0xBAD, function=None, why_unknown="it ran"), "differs"),
    ],
)
def test_a_memcg_that_is_charged_instead(active: ActiveMemcg, status: str) -> None:
    found = active_memcg_rows(image(tasks=[task(A, OBJCG_A)], active_memcgs=[active]))
    assert {row.memcg: row.status for row in found} == {A: status, None: "exact"}
    of_cpu = active._replace(task=None, owner=None)
    found = active_memcg_rows(image(tasks=[task(A, OBJCG_A)], active_memcgs=[of_cpu]))
    assert {row.memcg: row.status for row in found} == {A: "exact", None: status}


def proofs(*active: ActiveMemcg) -> list[Finding]:
    taken = image(tasks=[task(A, OBJCG_A)] * 2, active_memcgs=active)
    found = [pending.finding for pending in judge(taken).findings]
    return [finding for finding in found if finding.identity == "active_memcg"]


def test_a_proof_names_the_task_or_the_memcg_that_a_cpu_charges() -> None:
    [finding] = proofs(ACTIVE._replace(function=None))
    assert (finding.kind, finding.memcg, finding.difference) == ("stale-active-memcg", A, 1)
    assert finding.what == (
        "1 task would charge another memcg, and no function on the stack set it"
    )
    note = f"sh (7), active_memcg {B:#x}"
    assert finding.evidence == (Evidence(0x7000, "task", memcg=B, note=note),)
    cpu = ActiveMemcg(B, "CPU 3", None, None, None, None)
    [finding] = proofs(cpu)
    assert (finding.memcg, finding.what.split(" would")[0]) == (None, "1 CPU")
    note = f"CPU 3, active_memcg {B:#x}"
    assert finding.evidence == (Evidence(B, "CPU", memcg=B, note=note),)


def test_a_proof_counts_memcgs_that_were_freed() -> None:
    [finding] = proofs(ACTIVE._replace(function=None), ACTIVE._replace(memcg=0xBAD))
    assert (finding.kind, finding.difference) == ("freed-active-memcg", 2)
    assert finding.what == "2 tasks would charge another memcg; 1 of these memcgs were freed"
    # A memcg that is not in the image is named as an address only.
    assert [evidence.memcg for evidence in finding.evidence] == [B, None]


def test_why_a_memcg_that_is_charged_instead_is_not_known() -> None:
    row, _ = active_memcg_rows(
        image(
            tasks=[task(A, OBJCG_A)],
            active_memcgs=[ACTIVE._replace(function=None, why_unknown="it ran")],
        )
    )
    assert row.reason == "active_memcg of sh (7) is set: it ran"


def test_a_memcg_that_could_not_be_read_is_not_taken_for_freed() -> None:
    missing = Coverage()
    missing.miss("memcg", 0xBAD, "not in the image")
    for function in ("folio_alloc_buffers", None):
        active = ACTIVE._replace(memcg=0xBAD, function=function)
        row, _ = active_memcg_rows(
            image(tasks=[task(A, OBJCG_A)], active_memcgs=[active], coverage={"memcgs": missing})
        )
        assert row.status == ("unverifiable" if function else "differs")
        reason = "active_memcg of sh (7) is a memcg that is not in the image"
        assert row.reason == (reason if function else None)


def test_cached_stacks_are_not_charged() -> None:
    pages = [CachedStackPage(0, 0x1000, 0, 0), CachedStackPage(1, 0x2000, 1, OBJCG_A)]
    missing = {"cached_stacks": Coverage(2, 1)}
    rows = cached_stack_rows(image(cached_stacks=pages, coverage=missing))
    told = {row.nid: (row.status, row.reason) for row in rows}
    # A charged one that was read is a fault, whatever else is missing.
    assert told == {
        0: ("unverifiable", "cached stacks are not in the image"),
        1: ("differs", None),
    }
    rows = cached_stack_rows(image(cached_stacks=pages))
    assert {row.nid: (row.status, row.difference) for row in rows if row.claimed["cached"]} == {
        0: ("exact", 0),
        1: ("differs", 1),
    }


def test_proofs_of_charged_stacks_and_of_stale_tasks() -> None:
    pages = [CachedStackPage(n, 0x1000 * n, 1, OBJCG_A if n else 0) for n in range(3)]
    tasks = [
        task(A, OBJCG_A),
        task(A, OBJCG_B)._replace(objcgs=(0, OBJCG_B, OBJCG_A), pid=9),
        task(B, OBJCG_A)._replace(address=0x8000),
    ]
    found = [p.finding for p in judge(image(cached_stacks=pages, tasks=tasks)).findings]
    [stack] = [finding for finding in found if finding.identity == "cached_stacks"]
    assert (stack.kind, stack.nid, stack.difference) == ("charged-cached-stack", 1, 2)
    assert stack.what == "2 pages of cached kernel stacks on node 1 are charged"
    notes = [(e.address, e.kind, e.nid, e.page, e.objcg, e.memcg, e.note) for e in stack.evidence]
    assert notes == [
        (0x1000 * n, "kmem", 1, 0x1000 * n, OBJCG_A, A, f"in the cache of CPU {n}") for n in (1, 2)
    ]
    stale = {finding.memcg: finding for finding in found if finding.identity == "task_objcg"}
    assert stale.keys() == {A, B}
    assert stale[A].what == "1 task of this memcg cached an obj_cgroup of another memcg"
    assert [(e.address, e.kind, e.objcg, e.note) for e in stale[A].evidence] == [
        (0x7000, "task", OBJCG_B, "sh (9)")
    ]
    assert [(e.address, e.objcg, e.memcg) for e in stale[B].evidence] == [(0x8000, OBJCG_A, B)]


def test_tasks_that_were_not_all_read() -> None:
    tasks = [task(A, OBJCG_A), task(B, OBJCG_A)]
    rows = task_rows(image(tasks=tasks, coverage={"tasks": Coverage(2, 1)}))
    assert {row.memcg: (row.status, row.reason) for row in rows} == {
        A: ("unverifiable", "tasks are not all in the image"),
        B: ("differs", None),
    }


def test_a_task_with_an_obj_cgroup_that_was_not_read() -> None:
    tasks = [task(A, 0xBAD), task(B, OBJCG_B)]
    rows = task_rows(image(tasks=tasks, coverage={"objcgs": Coverage(2, 1)}))
    assert {row.memcg: (row.status, row.reason) for row in rows} == {
        A: ("unverifiable", "obj_cgroups are not all in the image"),
        B: ("exact", None),
    }
    # It may be one of a memcg that was not read.
    rows = task_rows(image(tasks=tasks, coverage={"memcgs": Coverage(2, 1)}))
    assert {row.memcg: row.status for row in rows}[A] == "unverifiable"


def test_tasks_that_charge_another_memcg_are_counted_by_their_own() -> None:
    """One of ``/a`` is wrong, and so is a CPU; those of ``/a/b`` are not."""
    wrong = ACTIVE._replace(function=None)
    cpu = wrong._replace(name="CPU 1", task=None, owner=None)
    tasks = [task(A, OBJCG_A), task(A, OBJCG_A), task(B, OBJCG_B)]

    def told(*active: ActiveMemcg) -> list[tuple[Any, ...]]:
        rows = active_memcg_rows(image(tasks=tasks, active_memcgs=active))
        return [(r.memcg, r.item, r.unit, r.found, r.claimed) for r in rows]

    by_task, by_cpu = ("task->active_memcg", "references"), ("int_active_memcg", "references")
    of_b = (B, *by_task, {"tasks": 1}, {"tasks": 1})
    assert told(wrong) == [
        (A, *by_task, {"tasks": 1}, {"tasks": 2}),
        of_b,
        (None, *by_cpu, {"cpus": 2}, {"cpus": 2}),
    ]
    assert told(cpu) == [
        (A, *by_task, {"tasks": 2}, {"tasks": 2}),
        of_b,
        (None, *by_cpu, {"cpus": 1}, {"cpus": 2}),
    ]
