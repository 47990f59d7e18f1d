# SPDX-License-Identifier: LGPL-2.1-or-later
"""Machines stopped in full flight, or crashed: no finding, and half-done charges with evidence."""

from __future__ import annotations

import re

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.percpu import per_cpu
from drgn.helpers.linux.pid import for_each_task
from support.findings import by_path, named
from support.guests import (
    ARCH,
    BUILT_KERNELS,
    DEBIAN_KERNELS,
    GuestImage,
    Lab,
    Plant,
    series,
)
from support.planters import planters_of
from support.planting import Fault, Subject, Write, change, ended

from memcg_inspect.checks.half_done import FLUSH
from memcg_inspect.collect import audit, collect
from memcg_inspect.helpers import find_memcg
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.stacktrace import read_running
from memcg_inspect.linux.kernel.stacktrace_words import stack_of
from memcg_inspect.linux.kernel.workqueue import works_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.report import Report

KERNELS = [*DEBIAN_KERNELS, *(k for k in BUILT_KERNELS if k.endswith("-lab"))]
#: One of the oldest and the newest kernel by default, ten of each sort with --all.
BUSY = [(kernel, 1) for kernel in KERNELS]
MORE_BUSY = [(kernel, seed) for kernel in KERNELS for seed in (2, 3)]
#: The crash kernel of 6.1 for arm64 has an external abort while it reads /proc/vmcore.
CRASHING = [kernel for kernel in KERNELS if kernel != "6.1/arm64"]
PANIC = [(kernel, "mixed") for kernel in CRASHING if series(kernel) == "6.1"]
MORE_PANIC = [
    (kernel, workload)
    for kernel in CRASHING
    for workload in ("mixed", "churn")
    if (kernel, workload) not in PANIC
]

#: Functions that make charges; one by default.
INSIDE = [
    pytest.param("6.1", "refill_obj_stock", marks=pytest.mark.long),
    ("7.3", "try_charge_memcg"),
]
MORE_INSIDE = [
    (kernel, function)
    for kernel in KERNELS
    for function in (
        "page_counter_uncharge",
        "drain_stock",
        "refill_stock",
        "__memcg_kmem_charge_page",
        "copy_process",
        "mem_cgroup_css_rstat_flush",
        "css_free_rwork_fn",
        "css_release_work_fn",
        "rcu_work_rcufn",
        "obj_cgroup_release",
    )
    # inlined there
    if (kernel, function) not in (("6.1/arm64", "refill_stock"), ("6.12/arm64", "refill_stock"))
]
#: Functions that change one counter at several levels, and numbers of instructions in them.
BETWEEN_LEVELS = [
    (kernel, function, seed)
    for kernel, function in (
        ("6.1", "__mod_memcg_lruvec_state"),
        ("6.12", "__lruvec_stat_mod_folio"),
        ("7.3", "mod_memcg_lruvec_state"),
        ("7.2", "mod_node_page_state"),
        ("7.3", "refresh_cpu_vm_stats"),
    )
    for seed in (1, 2)
]
#: What is planted, in the unit of the identity: less than a charge, one page, a batch, and more.
SIZES = {"slab": (1, 4096, 1_000_003), "usage": (1, 64, 100_000)}
#: More than all CPUs can have left half done.
LARGE = 5_000

#: Bytes: more than all CPUs can have left half done, and what is planted.
HALF_DONE, PLANTED = 1 << 20, 1 << 26

pytestmark = pytest.mark.image


def check_nothing_wrong(report: Report) -> None:
    assert report.findings == ()
    assert report.verdict in ("exact", "incomplete")
    assert sum(cell.count for cell in report.skew) > 500
    for row in report.rows:
        assert row.status in ("exact", "in-flight", "unverifiable")
        if row.status != "exact":
            assert row.reason
        if row.status == "in-flight":
            assert row.difference
        if row.allowance is not None:
            assert row.allowance.amount == row.difference
    # what is off is little: at most one charge for each CPU. What a flush moves can be of any size.
    differing = [
        r
        for r in report.rows
        if r.status != "exact" and r.unit == "bytes" and not re.search(FLUSH, r.reason or "")
    ]
    assert all(abs(r.difference or 0) < HALF_DONE for r in differing)


def not_in_the_image(address: int, count: int, offset: int, physical: bool) -> bytes:
    raise FaultError("not in the image", address)


def unread_pages(prog: Program) -> int:
    """Return the most pages that CPUs whose stacks could not be read may have left half done."""
    image = image_of(prog)
    limits = collect(image).limits
    unread = [cpu for cpu in read_running(image) if cpu.busy and cpu.held is None]
    return len(unread) * limits.folio_batch * limits.block


def flushes(prog: Program) -> bool:
    """Return whether a CPU was stopped in a flush, which changes the counters by any amount."""
    running = read_running(image_of(prog))
    return any(re.search(FLUSH, name) for cpu in running for name in cpu.functions)


@pytest.mark.each_kernel
@pytest.mark.parametrize(("kernel", "seed"), BUSY)
def test_stopped_in_full_flight(lab: Lab, kernel: str, seed: int) -> None:
    check_nothing_wrong(lab.image(kernel, "4", "churn", freeze="busy", seed=seed).report())


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "seed"), MORE_BUSY)
def test_stopped_in_full_flight_again(lab: Lab, kernel: str, seed: int) -> None:
    check_nothing_wrong(lab.image(kernel, "4", "churn", freeze="busy", seed=seed).report())


def crash(lab: Lab, kernel: str, workload: str) -> GuestImage:
    """Return the memory that the crash kernel saved: all of it, where makedumpfile fails."""
    # 1.7.2 on arm64: "VA Bits 52 not supported", and "Can't convert a virtual address" on 6.1
    how: dict[str, object] = (
        {"format": "elf"} if ARCH == "arm64" else {"format": "kdump", "level": 23}
    )
    return lab.image(kernel, "4", workload, freeze="panic", **how)


@pytest.mark.parametrize(("kernel", "workload"), PANIC)
def test_crashed(lab: Lab, kernel: str, workload: str) -> None:
    check_nothing_wrong(crash(lab, kernel, workload).report())


@pytest.mark.parametrize(("kernel", "workload"), PANIC)
def test_fault_in_a_crash_dump_is_found(lab: Lab, kernel: str, workload: str) -> None:
    """The dump tells with BTF, too, that CPUs were idle, and idle CPUs excuse nothing."""
    prog = crash(lab, kernel, workload).own_program()
    running = [cpu for cpu in read_running(image_of(prog)) if not cpu.waiting]
    # A CPU that was in user mode was in no function, and is not busy.
    assert all(cpu.functions or not cpu.busy for cpu in running)
    idle = [cpu for cpu in running if cpu.pid == 0]
    # The others may have run a worker.
    assert idle
    for cpu in idle:
        # An idle task does more than wait: it goes to sleep, and it is interrupted. Under TCG, the
        # ticks of all CPUs can take long: read_hpet() leaves the guest.
        waits = re.search("halt|mwait|default_idle|cpu_do_idle", cpu.functions[0])
        assert not cpu.busy if waits else {"do_idle", "cpu_startup_entry"} & {*cpu.functions}, cpu
    pages = 60_000 + unread_pages(prog)
    memcg = find_memcg(prog, "/files/web")
    usage = memcg.memory.usage.counter
    planted = (int(usage) + pages).to_bytes(8, "little")

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return planted[offset : offset + count]

    prog.add_memory_segment(usage.address_of_(), 8, read, False)
    assert int(memcg.memory.usage.counter) == int.from_bytes(planted, "little")
    report = audit(image_of(prog))
    assert ("usage", memcg.value_(), pages) in {
        (finding.identity, finding.memcg, finding.difference) for finding in report.findings
    }


@pytest.mark.parametrize("lost", ["runqueue", "task"])
def test_cpu_whose_task_cannot_be_read(lab: Lab, lost: str) -> None:
    """It may have been anywhere: what it may have left half done is neither exact nor wrong."""
    image = lab.image("7.3", "2")
    subject = Subject(image.own_program())
    running = per_cpu(subject.prog["runqueues"], 0).curr
    thing = running if lost == "runqueue" else running.comm
    unread = thing.address_of_().value_()
    subject.prog.add_memory_segment(unread, 8, not_in_the_image, False)
    counter = subject.percpu_counter("/files/web", "NR_SLAB_UNRECLAIMABLE_B", 0)
    report = subject.audit(Fault((subject.add(counter, 64),), ("/files/web",), set()))
    assert (report.verdict, report.findings) == ("incomplete", ())
    [unreadable] = report.coverage["cpus"].examples
    assert (unreadable.address, unreadable.what) == (unread, "task that a CPU was running")


@pytest.mark.parametrize("lost", ["stack", "blocked task", "sleeping task", None])
def test_task_on_no_cpu_that_cannot_be_read(lab: Lab, lost: str | None) -> None:
    """
    It may have been stopped in the middle of a charge, unless the runqueues say that it slept.

    If it is whole, its stack says so.
    """
    subject = Subject(lab.image("7.3", "2").own_program())
    task = next(
        t for t in for_each_task(subject.prog) if t.mm and t.pid > 1 and t.member_("__state") == 1
    )
    state = task.member_("__state").address_of_().value_()
    # In the middle of a charge, it would have waited without being interruptible.
    blocked = per_cpu(subject.prog["runqueues"], 1).nr_uninterruptible
    writes = [change(blocked, (int(blocked) + (lost == "blocked task")) % 2**64)]
    if lost in ("blocked task", "sleeping task"):
        subject.prog.add_memory_segment(state, 4, not_in_the_image, False)
    else:
        writes.append(Write(state, bytes(4)))  # it was preempted
    if lost == "stack":
        subject.prog.add_memory_segment(*stack_of(subject.image, task), not_in_the_image, False)
    counter = subject.percpu_counter("/files/web", "NR_SLAB_UNRECLAIMABLE_B", 0)
    writes.append(subject.add(counter, 64))
    report = subject.audit(Fault(tuple(writes), ("/files/web",), set()))
    if lost in ("sleeping task", None):
        assert report.verdict == "findings"
        assert "cpus" not in report.coverage
        return
    assert (report.verdict, report.findings) == ("incomplete", ())
    [unreadable] = report.coverage["cpus"].examples
    assert (unreadable.address, unreadable.what) == (
        (task.value_(), "stack of a task")
        if lost == "stack"
        else (state, "task that was not running")
    )


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "workload"), MORE_PANIC)
def test_crashed_more(lab: Lab, kernel: str, workload: str) -> None:
    check_nothing_wrong(crash(lab, kernel, workload).report())


@pytest.mark.parametrize("kernel", ["6.1", "7.3"])
def test_fault_in_full_flight_is_found(lab: Lab, plant: Plant, kernel: str) -> None:
    """What is beyond the bound is a finding on a machine in full flight, too."""
    image = lab.image(kernel, "4", "churn", freeze="busy", seed=1)
    prog, item = image.program(), "NR_SLAB_UNRECLAIMABLE_B"
    path, address = next(
        (path, address) for path, address in by_path(image.report()).items() if "group" in path
    )
    slot = StatReader(image_of(prog), [item]).slots[item]
    memcg = f"Object(prog, 'struct mem_cgroup *', {address:#x})"
    state = f"per_cpu_ptr({memcg}.nodeinfo[0].lruvec_stats_percpu, 0).state[{slot}]"
    report = plant(image, (state, f"old + {PLANTED}"))
    [row] = [
        row
        for row in report.rows
        if (row.identity, row.memcg, row.nid, row.item) == ("slab", address, 0, item)
    ]
    if row.status == "unverifiable":
        assert flushes(prog)
        return
    found = [d for p, nid, i, d in named(report) if (p, nid, i) == (path, 0, item)]
    assert [abs((difference or 0) - PLANTED) < HALF_DONE for difference in found] == [True]


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_that_are_off_in_full_flight_are_found(lab: Lab, plant: Plant, kernel: str) -> None:
    """Four CPUs can have left some hundred pages half done, and not ten thousand."""
    image = lab.image(kernel, "4", "churn", freeze="busy", seed=1)
    # A CPU whose stack cannot be read may have uncharged a batch of the largest folios.
    unread = unread_pages(image.program())
    path, address = next(
        (path, address) for path, address in by_path(image.report()).items() if "group" in path
    )
    memcg = f"Object(prog, 'struct mem_cgroup *', {address:#x})"
    slots = StatReader(image_of(image.program()), ["MEMCG_KMEM", "NR_KMEM"]).slots
    [(item, slot)] = slots.items()
    state = f"per_cpu_ptr({memcg}.vmstats_percpu, 0).state[{slot}]"
    if item == "NR_KMEM":
        state = f"per_cpu_ptr({memcg}.nodeinfo[0].lruvec_stats_percpu, 0).state[{slot}]"
    usage = f"{memcg}.memory.usage"
    planted = ((usage, 10_000 + unread, "usage"), (state, 30_000 + unread, "kmem"))
    for place, pages, identity in planted:
        report = plant(image, (place, f"old + {pages}"))
        rows = [row for row in report.rows if (row.identity, row.memcg) == (identity, address)]
        if identity == "kmem" and "unverifiable" in {row.status for row in rows}:
            assert flushes(image.program())
            continue
        assert report.verdict == "findings"
        found = [f for f in report.findings if f.identity == identity and f.memcg == address]
        size = {"pages": 1, "bytes": 4096}
        assert [abs((f.difference or 0) / size[f.unit] - pages) < 1_000 for f in found] == [True]


def inside(lab: Lab, kernel: str, function: str, workload: str = "loaded") -> GuestImage:
    return lab.image(kernel, "4", workload, freeze=f"in:{function}", seed=0)


@pytest.mark.parametrize(("kernel", "function"), INSIDE)
def test_stopped_inside_a_charge(lab: Lab, kernel: str, function: str) -> None:
    """
    No finding; a fault is never exact, and a large one is found.

    A small one in a memcg that a CPU points to may be what that CPU is charging.
    """
    subject = Subject(inside(lab, kernel, function).program())
    check_nothing_wrong(subject.report)
    running = read_running(subject.image, subject.snapshot.memcgs, subject.snapshot.objcgs)
    stopped = [cpu for cpu in running if cpu.functions[:1] == (function,)]
    assert stopped
    assert all(cpu.busy for cpu in stopped)
    # Another CPU may be at the end of the function, and point to nothing any more.
    assert any(held.payer for cpu in stopped for held in cpu.held or ())
    payers = {subject.snapshot.payer(held.payer) for cpu in running for held in cpu.held or ()}
    charged = {path for path, memcg in subject.paths.items() if memcg in payers}
    # A flush changes the counters of a memcg by any amount.
    flushed = flushes(subject.prog)
    unread = unread_pages(subject.prog)
    more = {"slab": unread * subject.snapshot.image.page_size, "usage": unread}
    for below in ("/files/", "/churn/"):
        subject.below = below
        for identity, sizes in SIZES.items():
            for size in sizes:
                if below == "/churn/" and size < LARGE:
                    continue  # it may be exactly what a CPU is charging to the memcg
                planted = size + more[identity] if size > LARGE else size
                fault = planters_of(identity)[0].plant(subject, planted)
                outcome = ended(subject.report, identity, fault, subject.audit(fault))
                # A CPU whose stack shows no memcg may have charged any, but not that much.
                is_sure = size > LARGE and not flushed
                outcomes = {"found"} if is_sure else {"found", "unverifiable"}
                if size < LARGE and charged & set(fault.paths):
                    outcomes.add("in-flight")
                assert outcome.outcome in outcomes, (identity, size, below, outcome)


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "function"), MORE_INSIDE)
def test_stopped_inside_other_functions(lab: Lab, kernel: str, function: str) -> None:
    check_nothing_wrong(inside(lab, kernel, function, "churn").report())


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "function", "seed"), BETWEEN_LEVELS)
def test_stopped_between_levels(lab: Lab, kernel: str, function: str, seed: int) -> None:
    """With BTF, stacks do not show inlined functions, and show the right ones all the same."""
    image = lab.image(kernel, "4", "churn", freeze=f"in:{function}", seed=seed)
    for dwarf in (False, True):
        check_nothing_wrong(image.report(dwarf))


@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", ["6.1", "7.3"])
def test_one_charge_explains_one_event(lab: Lab, kernel: str) -> None:
    """
    The owner of an object is changed while a machine is in full flight.

    Two memcgs beside each other are wrong then. One charge does not explain both, in any identity.
    """
    subject = Subject(lab.image(kernel, "4", "loaded", freeze="busy", seed=1).program())
    subject.below = "/churn/"
    [planter] = [p for p in planters_of("slab") if p.what == "owner of an object"]
    fault = planter.plant(subject, 0)
    report = subject.audit(fault)
    memcgs = [subject.paths[path] for path in fault.paths]
    rows = [row for row in report.rows if row.memcg in memcgs and row.difference]
    assert {row.memcg for row in rows} == set(memcgs)
    shown = [
        {
            (a.cpu, a.pid, a.held is None)
            for row in rows
            if row.memcg == memcg and (a := row.allowance)
        }
        for memcg in memcgs
    ]
    # An interrupt can make one more charge, and a flush moves many.
    several = {
        (cpu.cpu, cpu.pid)
        for cpu in read_running(subject.image)
        if any(re.search(rf"irq|interrupt|sysvec|{FLUSH}", name) for name in cpu.functions)
    }
    assert {task[:2] for task in set.intersection(*shown)} <= several


@pytest.mark.parametrize("kernel", [pytest.param("6.1", marks=pytest.mark.long), "7.3"])
def test_what_frees_a_memcg(lab: Lab, kernel: str) -> None:
    """A worker that was stopped in css_free_rwork_fn() runs the work item of the memcg."""
    # Another CPU could be changing the lists of work items.
    where = "in:mem_cgroup_css_free"
    image = lab.image(kernel, "1", "churn", freeze=where, seed=0, cpus=1)
    check_nothing_wrong(image.report())
    prog = image.program()
    address = prog.symbol("css_free_rwork_fn").address
    missed: list[FaultError] = []
    works = list(works_of(image_of(prog), address, missed.append))
    assert works
    assert missed == []
