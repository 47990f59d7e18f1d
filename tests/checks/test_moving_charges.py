# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a task that takes its pages along to another memcg explains, and what it does not."""

from __future__ import annotations

from support.made import ROOT, A, B, snapshot

from memcg_inspect.checks.check import Explained
from memcg_inspect.checks.moving_charges import being_moved
from memcg_inspect.checks.rows import RowKey, make_row
from memcg_inspect.model import Held, Running
from memcg_inspect.model_kernel import Moving

PAGE = 4096
MOVING = Moving(source=A, target=B, precharged=700, moved=300, moved_swap=20)
AHEAD = "a task that moves here has charged 720 pages in advance"
BEHIND = "a task that moves away still has 300 pages charged here"


def moved(
    memcg: int, pages: int, *running: Running, moving: Moving | None = MOVING
) -> Explained | None:
    key = RowKey("usage", "memory.usage", "pages", memcg)
    row = make_row(key, {"lru": 0}, {"page_counter": pages})
    return being_moved(snapshot(moving=moving, running=running), row)


def task(function: str, *held: Held) -> Running:
    return Running(0, 7, "sh", (function, "do_syscall_64", "entry_SYSCALL_64"), True, held)


def test_the_pages_that_both_memcgs_have() -> None:
    assert moved(B, 720) == Explained("in-flight", AHEAD, 0)
    assert moved(A, 300) == Explained("in-flight", BEHIND, 0)
    assert moved(ROOT, 300) is None
    assert moved(A, 300, moving=None) is None
    assert moved(A, 300, moving=MOVING._replace(moved=0)) is None
    nothing = MOVING._replace(precharged=0, moved_swap=0)
    assert moved(B, 720, moving=nothing) is None


def test_a_rest_is_that_of_a_folio_that_a_task_moves() -> None:
    folio, object_ = Held("folio", 0xE000, A, 0, 2 * PAGE), Held("object", 0xE000, A, 0, 2 * PAGE)
    for function in ("mem_cgroup_move_account", "mem_cgroup_can_attach"):
        assert moved(A, 302, task(function, folio)) == Explained("in-flight", BEHIND, 2)
        assert moved(B, 718, task(function, folio)) == Explained("in-flight", AHEAD, -2)
    for running in (
        task("mem_cgroup_move_account", object_),
        task("mem_cgroup_move_account", folio._replace(bytes=PAGE)),
        # Any task may point to a folio.
        task("folio_add_lru", folio),
        task("mem_cgroup_move_account")._replace(held=None),
    ):
        assert moved(A, 302, running) == Explained("unverifiable", BEHIND, 2)
