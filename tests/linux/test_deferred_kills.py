# SPDX-License-Identifier: LGPL-2.1-or-later
"""Memcgs whose removal waits for tasks, in memory made as kernel/cgroup/cgroup.c fills it (7.2)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from drgn import FaultError, Object, offsetof
from support.layouts import MadeImage

from memcg_inspect.linux.kernel.cgroup_kill import kill_is_deferred, running_kills

VARIABLES, KILL, OTHER = 0xFFFFFFFF82000000, 0xFFFFFFFF81000100, 0xFFFFFFFF81000200
POOL, WORKERS, MISSING = 0xFFFF888000111000, 0xFFFF888000222000, 0xFFFF888077700000
#: The css of a memcg, its cgroup, and the cgroup above it.
CSS, CGROUP, PARENT = 0xFFFF888000333000, 0xFFFF888000444000, 0xFFFF888000555000
#: Flags of include/linux/cgroup-defs.h, ``WORK_STRUCT_PENDING`` and ``__PERCPU_REF_DEAD``.
ONLINE, VISIBLE, DYING, PENDING, DEAD = 2, 8, 16, 1, 2
#: ``memory_cgrp_id`` of this kernel.
SUBSYS = 1
STRUCTURES = """
    struct list_head { struct list_head *next; struct list_head *prev; };
    struct counter { long counter; };
    struct work_struct { struct counter data; struct list_head entry; void *func; };
    struct xarray { unsigned int lock; unsigned int flags; void *xa_head; };
    struct xa_node { void *head[5]; void *slots[64]; };
    struct idr { struct xarray idr_rt; unsigned int idr_base; };
    struct worker { struct list_head node; struct work_struct *current_work;
        void *current_func; struct list_head scheduled; };
    struct worker_pool { int cpu; struct list_head worklist; struct list_head workers; };
    struct workqueue_struct { struct list_head pwqs; struct list_head list; };
    struct pool_workqueue { int refcnt; struct list_head pwqs_node;
        struct list_head inactive_works; };
    struct percpu_ref { unsigned long percpu_count_ptr; void *data; };
"""
CGROUPS = """
    struct cgroup_subsys_state { struct cgroup *cgroup; struct percpu_ref refcnt;
        unsigned int flags; int nr_populated_csets; int nr_populated_children;
        struct work_struct kill_finish_work; struct cgroup_subsys_state *parent; };
    struct cgroup { unsigned long flags; struct cgroup_subsys_state self;
        unsigned int subtree_ss_mask; int nr_dying_subsys[3]; struct cgroup *dom_cgrp; };
"""
BEFORE = "struct cgroup_subsys_state { unsigned int flags; };"


def machine(flags: Mapping[str, int] | None = None) -> MadeImage:
    """
    Return a machine whose work queues are empty.

    :param flags: enumerators of the kernel
    """
    image = MadeImage()
    image.declare(STRUCTURES + CGROUPS)
    image.enum(None, memory_cgrp_id=SUBSYS, **(flags or {}))
    image.variable("worker_pool_idr", "struct idr", VARIABLES)
    image.make("struct idr", VARIABLES, {"idr_rt.xa_head": POOL})
    image.variable("workqueues", "struct list_head", VARIABLES + 64)
    image.make("struct worker_pool", POOL, {})
    for head in (VARIABLES + 64, POOL + 8, POOL + 24):
        image.words(head, head, head)
    return image


def memcg(image: MadeImage, css: Mapping[str, int] = {}, cgroup: Mapping[str, int] = {}) -> Object:
    """
    Make the memcg of a cgroup that was removed, with a task.

    :param css: other members of its css
    :param cgroup: other members of its cgroup
    """
    own = {"cgroup": CGROUP, "flags": ONLINE | DYING, "nr_populated_csets": 1}
    image.make("struct cgroup_subsys_state", CSS, own | css)
    at = offsetof(image.type("struct cgroup"), "self")
    of = {"self.flags": DYING, "self.parent": PARENT + at, "dom_cgrp": CGROUP}
    of |= {"self.refcnt.percpu_count_ptr": DEAD}
    image.make("struct cgroup", CGROUP, of | cgroup)
    image.make("struct cgroup", PARENT, {"subtree_ss_mask": 1 << SUBSYS})
    dying(image, 1)
    return image.pointer("struct cgroup_subsys_state *", CSS)[0]


def dying(image: MadeImage, count: int) -> None:
    """Let the cgroup have some memcgs that are being removed, and of other controllers more."""
    counts = image.pointer("struct cgroup *", CGROUP).nr_dying_subsys
    for subsys in range(3):
        number = count if subsys == SUBSYS else 1 - count
        image.write(counts[subsys].address_ or 0, number.to_bytes(4, "little", signed=True))


def enabled(image: MadeImage, mask: int) -> None:
    """Set the controllers that the cgroup above has enabled."""
    place = image.pointer("struct cgroup *", PARENT).subtree_ss_mask
    image.write(place.address_ or 0, mask.to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("member", "value"),
    [("nr_populated_csets", 1), ("nr_populated_children", 1), ("kill_finish_work.data", PENDING)],
)
def test_what_a_removal_waits_for(member: str, value: int) -> None:
    """Tasks in it, tasks below it, or the work item that they have queued."""
    image = machine()
    member += ".counter" if member.endswith("data") else ""
    assert kill_is_deferred(image, memcg(image, {"nr_populated_csets": 0, member: value}), ())
    assert not kill_is_deferred(image, memcg(image, {"nr_populated_csets": 0}), ())


def test_a_worker_that_runs_the_work_item() -> None:
    image = machine()
    css = memcg(image, {"nr_populated_csets": 0})
    assert kill_is_deferred(image, css, {CSS})
    assert not kill_is_deferred(image, css, {CGROUP})


@pytest.mark.parametrize("flags", [DYING, ONLINE | VISIBLE | DYING, 0, VISIBLE])
def test_flags_that_are_not_those_of_a_removal(flags: int) -> None:
    image = machine()
    assert not kill_is_deferred(image, memcg(image, {"flags": flags}), ())


def test_flags_as_the_kernel_declares_them() -> None:
    image = machine({"CSS_ONLINE": 1 << 5, "CSS_VISIBLE": 1 << 6})
    of_cgroup = {"self.flags": ONLINE}  # which means something else in this kernel
    for flags, is_deferred in ((1 << 5, True), (1 << 5 | VISIBLE, True), (3 << 5, False), (2, 0)):
        css = memcg(image, {"flags": flags}, of_cgroup)
        assert kill_is_deferred(image, css, ()) == is_deferred
    css = memcg(image, {"flags": 1 << 5}, {"self.flags": 1 << 5})
    assert not kill_is_deferred(image, css, ())


def test_a_cgroup_counts_its_memcgs_that_are_removed() -> None:
    image = machine()
    css = memcg(image)
    for count in (2, 1, 0, -1):
        dying(image, count)
        assert kill_is_deferred(image, css, ()) == (count > 0)


@pytest.mark.parametrize(("flags", "refcnt"), [(ONLINE, DEAD), (DYING, 0), (DYING, 1 | 4)])
def test_a_cgroup_that_was_not_removed(flags: int, refcnt: int) -> None:
    """Then the controller was switched off in it: that of memory is not for threaded cgroups."""
    image = machine()
    of = {"self.flags": flags, "self.refcnt.percpu_count_ptr": refcnt}
    for dom_cgrp, is_deferred in ((CGROUP, False), (PARENT, True)):
        css = memcg(image, cgroup={**of, "dom_cgrp": dom_cgrp})
        assert kill_is_deferred(image, css, ()) == is_deferred
    css = memcg(image, cgroup=of)
    for mask in (0, ~(1 << SUBSYS) & 0xFFFF, 1):
        enabled(image, mask)
        assert kill_is_deferred(image, css, ())
    enabled(image, 0xFFFF)
    assert not kill_is_deferred(image, css, ())


def test_kernels_that_kill_at_once() -> None:
    image = MadeImage()
    image.declare(BEFORE)
    image.make("struct cgroup_subsys_state", CSS, {"flags": ONLINE | DYING})
    css = image.pointer("struct cgroup_subsys_state *", CSS)[0]
    assert not kill_is_deferred(image, css, {CSS})
    faults: list[FaultError] = []
    assert running_kills(image, faults.append) == frozenset()
    assert faults == []


def workers(image: MadeImage, *runs: tuple[int, int]) -> None:
    """Let workers run work items: their addresses and functions."""
    ring = [POOL + 24, *(WORKERS + 128 * n for n in range(len(runs)))]
    for number, link in enumerate(ring):
        image.words(link, ring[(number + 1) % len(ring)], ring[number - 1])
    for link, run in zip(ring[1:], runs, strict=True):
        image.words(link + 16, *run)
        image.words(link + 32, link + 32, link + 32)


def test_work_items_that_workers_run() -> None:
    """One that is pending is still to be run."""
    image, faults = machine(), list[FaultError]()
    image.symbol_at("kill_css_finish_work_fn", KILL)
    assert running_kills(image, faults.append) == frozenset()
    at = offsetof(image.type("struct cgroup_subsys_state"), "kill_finish_work")
    works = [CSS + 0x400 * n + at for n in range(4)]
    for work, data in zip(works, (0, PENDING, 4, 0), strict=True):
        image.make("struct work_struct", work, {"data.counter": data})
    functions = (KILL, KILL, KILL, OTHER)
    workers(image, *zip(works, functions, strict=True))
    assert running_kills(image, faults.append) == {CSS, CSS + 0x800}
    assert faults == []
    workers(image, (MISSING, KILL), (works[0], KILL))
    assert running_kills(image, faults.append) == {CSS}
    assert [fault.address for fault in faults] == [MISSING]
