# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests of cgroup v1 that are stopped while a task moves, and takes its pages along."""

from __future__ import annotations

import pytest
from support.guests import Lab
from support.made import ROOT, A, B, snapshot
from support.planting import Fault, Subject

from memcg_inspect.checks.inflight import mark_in_flight
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Held, Running
from memcg_inspect.model_kernel import Moving

PAGE = 4096
MOVING = Moving(source=A, target=B, precharged=700, moved=300, moved_swap=20)


def status(memcg: int, pages: int, moving: Moving | None = MOVING, *running: Running) -> str:
    key = RowKey("usage", "memory.usage", "pages", memcg)
    row = make_row(key, {"lru": 0}, {"page_counter": pages})
    [found] = mark_in_flight(snapshot(moving=moving, running=running), [row])
    return found.status


def test_pages_that_are_charged_to_both_memcgs() -> None:
    assert status(A, 300) == status(B, 720) == "in-flight"
    assert status(A, 299) == status(B, 700) == status(ROOT, 300) == "differs"
    assert status(A, 300, None) == status(B, 720, None) == "differs"
    assert status(A, 300, MOVING._replace(moved=0)) == "differs"


def test_a_page_that_changes_its_owner() -> None:
    held = (Held("folio", 0xE000, A, 0, PAGE), Held("memcg", A, A), Held("memcg", B, B))
    functions = ("mem_cgroup_move_account", "do_syscall_64", "entry_SYSCALL_64")
    task = Running(0, 7, "sh", functions, True, held)
    assert status(A, 301, MOVING, task) == status(B, 719, MOVING, task) == "in-flight"
    assert status(A, 302, MOVING, task) == status(B, 718, MOVING, task) == "unverifiable"
    assert status(A, 900, MOVING, task) == "differs"


@pytest.mark.image
def test_a_task_that_takes_its_pages_along(lab: Lab) -> None:
    freeze = "in:mem_cgroup_move_account"
    image = lab.image("6.1", "2", "moving", freeze=freeze, seed=1, cgroup="v1")
    subject = Subject(image.program())
    assert subject.report.verdict == "exact"
    rows = {subject.path(r.memcg or 0): r for r in subject.report.rows if r.status != "exact"}
    assert rows.keys() == {"/moving/here", "/moving/there"}
    assert {row.identity for row in rows.values()} == {"usage"}
    assert sum(row.difference or 0 for row in rows.values()) > (24 << 20) // PAGE
    # Many pages more are not among those that move.
    counter = subject.percpu_counter("/moving/here", "MEMCG_KMEM")
    report = subject.audit(Fault((subject.add(counter, 5000),), ("/moving/here",), set()))
    assert report.verdict == "findings"
