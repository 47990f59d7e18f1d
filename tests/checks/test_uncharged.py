# SPDX-License-Identifier: LGPL-2.1-or-later
"""Objects that no memcg pays for, of caches that always account."""

from __future__ import annotations

from collections import Counter
from typing import Any

from support.made import snapshot

from memcg_inspect.checks.profile import Profile
from memcg_inspect.checks.uncharged import uncharged
from memcg_inspect.model import CallSite, SlabUsage
from memcg_inspect.report import Uncharged, UnchargedSite

TASKS, SIGNALS, FILES = 0x7000, 0x8000, 0x9000
SITE = CallSite(0x100, "kernel/fork.c", 190, None, "alloc_task_struct_node", True, 0, 0, 0)


def usage(cache: int, inuse: int, charged: int | None, **more: Any) -> SlabUsage:
    names = {TASKS: ("task_struct", 8192), SIGNALS: ("sighand", 2048), FILES: ("filp", 256)}
    name, size = names[cache]
    made = SlabUsage(0, name, cache, False, False, size, size + 8, 3, 9, 30, inuse, charged, True)
    return made._replace(**more)


def test_objects_are_added_up_by_cache_and_the_largest_comes_first() -> None:
    taken = snapshot(
        slab_usage=(
            usage(FILES, 20, 5),
            usage(TASKS, 10, 7),
            usage(TASKS, 6, 6, nid=1),
            usage(FILES, 9, 4, nid=1),
            # All are charged.
            usage(SIGNALS, 8, 8),
        )
    )
    assert uncharged(taken) == (
        Uncharged("task_struct", TASKS, 3, 3 * 8192),
        Uncharged("filp", FILES, 20, 20 * 256),
    )


def test_caches_that_do_not_always_account_are_left_out() -> None:
    others = (usage(TASKS, 9, 0, accounts=False), usage(FILES, 9, 0, kfence=True))
    assert uncharged(snapshot(slab_usage=others)) == ()


def test_more_objects_charged_than_taken_do_not_count_against_others() -> None:
    """Pages of kfence do not count objects, and a CPU may take one while the slab is read."""
    taken = snapshot(slab_usage=(usage(TASKS, 5, 8), usage(TASKS, 5, 3, nid=1)))
    assert uncharged(taken) == (Uncharged("task_struct", TASKS, 2, 2 * 8192),)


def test_a_cache_that_could_not_be_read_on_one_node_is_not_known() -> None:
    taken = snapshot(slab_usage=(usage(TASKS, 5, 3), usage(TASKS, 5, None, nid=1)))
    assert uncharged(taken) == (Uncharged("task_struct", TASKS, None, None),)


def test_call_sites_of_a_kernel_that_profiles_allocations() -> None:
    slabs = (usage(TASKS, 10, 4), usage(FILES, 5, 4))
    calls = Counter({(TASKS, 0x100): 2, (TASKS, 0x200): 3, (SIGNALS, 0x100): 9})
    profile = Profile(sites={0x100: SITE}, uncharged=calls)
    tasks, files = uncharged(snapshot(slab_usage=slabs, profile=profile))
    assert tasks.sites == (
        UnchargedSite("no call site at 0x200", 3),
        UnchargedSite("kernel/fork.c:190 func:alloc_task_struct_node", 2),
    )
    assert files.sites == ()
    off = Profile(why_not="the kernel does not profile allocations", uncharged=calls)
    assert [c.sites for c in uncharged(snapshot(slab_usage=slabs, profile=off))] == [None, None]
