# SPDX-License-Identifier: LGPL-2.1-or-later
"""Memcgs whose removal waits for tasks that exit, on images of real kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drgn import container_of
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.sched import cpu_curr
from support.findings import named
from support.guests import KERNELS, GuestImage, Lab
from support.planters.css_refs import of_memcg
from support.planting import Fault, Subject
from support.stack_words import check_is_found

from memcg_inspect.image.image import image_of
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.lib.percpu_refcount import percpu_ref_is_dying

pytestmark = pytest.mark.image

PARENT, CHILD = "/exiting/parent", "/exiting/parent/child"
BOTH, OFF = "/exiting/both", "/exiting/off/child"
DEFERRED = {PARENT, CHILD, BOTH, OFF}

#: What damage does to one field of a memcg whose removal is deferred.
DAMAGE: dict[str, tuple[str, str, Callable[[int], int]]] = {
    "css is visible": (BOTH, "css.flags", lambda flags: flags | 8),
    "css is offline": (BOTH, "css.flags", lambda flags: flags & ~2),
    "no tasks": (BOTH, "css.nr_populated_csets", lambda _: 0),
    "no children with tasks": (PARENT, "css.nr_populated_children", lambda _: 0),
    "no css is dying": (BOTH, "css.cgroup.nr_dying_subsys", lambda _: 0),
    "the cgroup is online": (BOTH, "css.cgroup.self.flags", lambda flags: flags | 2),
    "the controller is on": (OFF, "css.parent.cgroup.subtree_ss_mask", lambda mask: 0xFF),
}


def defers(image: GuestImage) -> bool:
    return has_member(image_of(image.program()), "struct cgroup_subsys_state", "kill_finish_work")


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_memcgs_removed_while_their_tasks_exit(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "2", "exiting")
    subject = Subject(image.program())
    assert subject.report.verdict == "exact"
    if not defers(image):
        return
    states = {memcg.path: memcg.state for memcg in subject.report.memcgs}
    assert {path for path, state in states.items() if state == "dying"} == DEFERRED
    assert states["/exiting/stays"] == "online"
    for memcg in subject.snapshot.memcgs.values():
        if memcg.path in DEFERRED:
            css = subject.object("struct mem_cgroup *", memcg.address).css
            assert not memcg.offline
            assert not percpu_ref_is_dying(css.refcnt.address_of_())
            for off in (1, -1):
                check_is_found(subject, memcg.address, memcg.path, off)


@pytest.mark.newest_kernel
@pytest.mark.parametrize("what", DAMAGE)
def test_a_removal_that_only_some_fields_show(lab: Lab, what: str) -> None:
    """A memcg with a damaged flag is not taken for one whose removal is deferred."""
    subject = Subject(lab.image("7.3", "2", "exiting").program())
    path, member, change = DAMAGE[what]
    [address] = [m.address for m in subject.snapshot.memcgs.values() if m.path == path]
    field = subject.object("struct mem_cgroup *", address)
    for name in member.split("."):
        field = field.member_(name)
    if member.endswith("nr_dying_subsys"):
        field = field[subject.prog["memory_cgrp_id"]]
    value = change(int(field))
    assert value != int(field)
    report = subject.audit(Fault((subject.put(field, value),), (path,), set()))
    assert report.verdict == "incomplete"
    assert not report.findings
    assert report.coverage["memcgs"].unreadable


@pytest.mark.newest_kernel
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_work_item_that_kills_a_memcg(lab: Lab, seed: int) -> None:
    """It holds a reference and is not pending; its stack need not point to the memcg."""
    # Another CPU would excuse a few references of any memcg that is removed. Each cgroup has a css
    # of perf_event, too, and the function kills one css after the other.
    where, only = "in:kill_css_finish_work_fn", "cgroup_disable=perf_event"
    image = lab.image("7.3", "1", "rmdirs", freeze=where, seed=seed, cpus=1, append=only)
    subject, prog = Subject(image.program()), image.program(dwarf=True)
    assert not subject.report.findings
    traces = [prog.stack_trace(cpu_curr(prog, cpu)) for cpu in for_each_online_cpu(prog)]
    [frame] = [f for trace in traces for f in trace if f.name == "kill_css_finish_work_fn"]
    work = frame["work"]
    memcg = container_of(work, "struct cgroup_subsys_state", "kill_finish_work").value_()
    path = subject.snapshot.memcgs[memcg].path
    # A task that is stopped may hold a reference, or have dropped one that it has not counted.
    [before] = [r for r in subject.report.rows if (r.identity, r.memcg) == ("css_refs", memcg)]
    report = subject.audit(of_memcg(subject, memcg, path, 5))
    assert named(report, "css_refs") == {(path, None, "css.refcnt", 5 + (before.difference or 0))}


@pytest.mark.newest_kernel
@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_memcgs_that_are_removed_without_end(lab: Lab, seed: int) -> None:
    report = lab.image("7.3", "2", "rmdirs", freeze="busy", seed=seed).report()
    assert not report.findings
    assert not report.coverage["memcgs"].unreadable
