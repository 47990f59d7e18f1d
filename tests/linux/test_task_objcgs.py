# SPDX-License-Identifier: LGPL-2.1-or-later
"""The obj_cgroups that a task caches, in each layout of ``struct task_struct``."""

from __future__ import annotations

import pytest
from support.layouts import MadeImage

from memcg_inspect.linux.kernel.sched import _objcgs, caches_objcg
from memcg_inspect.linux.mm.mmzone import possible_nodes

TASK, ARRAY = 0xFFFF888000111000, 0xFFFF888000222000
ONE, TWO, OTHER = 0xFFFF888000333000, 0xFFFF888000444000, 0xFFFF888000555000
#: ``CURRENT_OBJCG_UPDATE_FLAG``
STALE = 1


def machine(member: str, value: int = 0) -> MadeImage:
    """Return a machine with three nodes, and a task with a member."""
    image = MadeImage()
    image.given[possible_nodes] = range(3)
    image.declare("struct obj_cgroup { long refcnt; };")
    image.declare(f"struct task_struct {{ int pid; {member} }};")
    image.make("struct task_struct", TASK, {})
    image.words(TASK + 8, value)
    return image


def objcgs(image: MadeImage) -> tuple[tuple[int, ...], bool]:
    return _objcgs(image, image.pointer("struct task_struct *", TASK))


@pytest.mark.parametrize("stale", [0, STALE])
def test_one_for_each_node(stale: int) -> None:
    """A task that has charged nothing yet has no array, and may be told to update it."""
    image = machine("struct obj_cgroup **objcgs;", ARRAY | stale)
    assert caches_objcg(image)
    image.words(ARRAY, ONE, TWO, 0, OTHER)
    assert objcgs(image) == ((ONE, TWO, 0), bool(stale))
    image.words(TASK + 8, stale)
    assert objcgs(image) == ((), bool(stale))


@pytest.mark.parametrize("stale", [0, STALE])
def test_one_for_all_nodes(stale: int) -> None:
    image = machine("struct obj_cgroup *objcg;", ONE | stale)
    assert caches_objcg(image)
    assert objcgs(image) == ((ONE,), bool(stale))


def test_tasks_that_cache_none() -> None:
    """Up to 6.6."""
    image = machine("long other;", ONE | STALE)
    assert not caches_objcg(image)
    assert objcgs(image) == ((), False)
