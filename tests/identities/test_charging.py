# SPDX-License-Identifier: LGPL-2.1-or-later
"""One page, on a guest in which each task points to pages and objects of its memcg."""

from __future__ import annotations

import re

import pytest
from drgn import Program
from drgn.helpers.linux.cpumask import for_each_online_cpu
from drgn.helpers.linux.sched import cpu_curr
from support.guests import KERNELS, Lab
from support.planting import Fault, Subject

from memcg_inspect.linux.kernel.stacktrace import read_running

pytestmark = pytest.mark.image


#: Rows that a charge of one page shows in.
OF_PAGES = ("kmem", "usage", "objcg_bytes")
#: Functions that obj_cgroup_charge_pages() and obj_cgroup_uncharge_pages() call to change the page
#: counter, or MEMCG_KMEM: a CPU that is in one of them may have changed only one of the two.
CHANGING = re.compile(
    r"_*(page_counter_|try_charge|(refill|drain|consume)_stock|mod_memcg_|memcg_account)"
)


def changing(prog: Program) -> list[str]:
    """Return the tasks of CPUs that may have changed one of the page counter and MEMCG_KMEM."""
    found = []
    for cpu in for_each_online_cpu(prog):
        task = cpu_curr(prog, cpu)
        if CHANGING.match(prog.stack_trace(task)[0].name or ""):
            found.append(f"CPU {cpu} ({task.comm.string_().decode()}, {task.pid.value_()})")
    return found


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "function",
    [pytest.param("kmem_cache_free", marks=pytest.mark.long), "get_page_from_freelist"],
)
def test_a_page_too_many_is_never_exact(lab: Lab, kernel: str, function: str) -> None:
    image = lab.image(kernel, "4", "churn", freeze=f"in:{function}", seed=1)
    subject = Subject(image.program())
    assert not subject.report.findings
    rows = [row for row in subject.report.rows if row.memcg and row.identity in OF_PAGES]
    off = {subject.path(row.memcg or 0) for row in rows if row.status != "exact"}
    paths, excused = [p for p in subject.victims() if p not in off], changing(subject.prog)
    assert paths
    for path in paths:
        # Whatever a stack points to, the page counter does not show it.
        for pages in (1, -1):
            counter = subject.percpu_counter(path, "MEMCG_KMEM")
            report = subject.audit(Fault((subject.add(counter, pages),), (path,), set()))
            key = "kmem", subject.paths[path]
            [row] = [row for row in report.rows if (row.identity, row.memcg) == key]
            assert row.difference == pages
            # Unless a CPU is about to change the page counter, too.
            assert row.status in ("differs", "unverifiable") or any(
                task in (row.reason or "") for task in excused
            ), row


def test_one_page_is_no_large_kmalloc(lab: Lab) -> None:
    """A task that frees a pipe points to a page of kernel memory, which is in no slab counter."""
    image = lab.image("7.3", "4", "churn", freeze="in:get_page_from_freelist", seed=1)
    subject = Subject(image.program())
    running = read_running(subject.image, subject.snapshot.memcgs, subject.snapshot.objcgs)
    for held in [held for cpu in running for held in cpu.held or () if held.kind == "kmem"]:
        assert (held.detail == "unreclaimable") == (held.bytes > 4096)


@pytest.mark.long
def test_a_task_that_sleeps_in_a_charge(lab: Lab) -> None:
    """try_charge_memcg() charges, and lets the task sleep. MEMCG_KMEM has not changed yet."""
    # fork() charges some 500 pages for memory areas. Each task in the memcg also sleeps when it
    # returns to user mode, so the guest is stopped at the first sleep that begins after a fork()
    # has begun, when the only CPU becomes idle.
    freeze = "in:copy_process/schedule_timeout_killable/tick_nohz_idle_enter"
    subject = Subject(lab.image("7.3", "1", "highforks", freeze=freeze, cpus=1).program())
    assert subject.report.verdict == "exact"
    rows = {r.identity: r for r in subject.report.rows if r.status != "exact"}
    row = rows["usage"]
    assert (row.status, row.difference, subject.path(row.memcg or 0)) == ("in-flight", 1, "/high")
    # A stack shows the object, or only its cache.
    assert "half-done charge of" in (row.reason or "")
    assert "by highforks" in (row.reason or "")
    assert "which was not running" in (row.reason or "")
    assert "kmem" not in rows
    report = subject.audit(
        Fault((subject.add(subject.percpu_counter("/high", "MEMCG_SOCK"), 1),), ("/high",), set())
    )
    assert report.verdict == "findings"
