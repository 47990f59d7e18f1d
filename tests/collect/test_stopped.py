# SPDX-License-Identifier: LGPL-2.1-or-later
"""Machines stopped in full flight, or crashed: exact, or in-flight with a bound."""

from __future__ import annotations

import pytest
from support.findings import by_path, named
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, Lab, Plant

from memcg_inspect.collect import audit
from memcg_inspect.helpers import find_memcg
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.kernel.stacktrace import read_running
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.report import Report

KERNELS = [*DEBIAN_KERNELS, *(k for k in BUILT_KERNELS if k.endswith("-lab"))]
#: One of each kernel by default, ten of each sort with --all.
BUSY = [(kernel, 1) for kernel in KERNELS]
MORE_BUSY = [(kernel, seed) for kernel in KERNELS for seed in (2, 3)]
PANIC = [(kernel, "mixed") for kernel in KERNELS if kernel in ("6.1", "7.3-lab")]
MORE_PANIC = [
    (kernel, workload)
    for kernel in KERNELS
    for workload in ("mixed", "churn")
    if (kernel, workload) not in PANIC
]

#: Bytes: more than all CPUs can have left half done, and what is planted.
HALF_DONE, PLANTED = 1 << 20, 1 << 26

pytestmark = pytest.mark.image


def check_nothing_wrong(report: Report) -> None:
    assert report.findings == ()
    assert report.verdict == "exact"
    assert sum(cell.count for cell in report.skew) > 500
    for row in report.rows:
        assert row.status in ("exact", "in-flight")
        if row.status == "in-flight":
            # with the bound, and who it was
            assert row.difference
            assert row.reason
            assert "at most" in row.reason
            assert "CPU" in row.reason or "0x" in row.reason
    # what is off is little: at most one charge for each CPU
    differing = [r for r in report.rows if r.status == "in-flight" and r.unit == "bytes"]
    assert all(abs(r.difference or 0) < HALF_DONE for r in differing)


@pytest.mark.parametrize(("kernel", "seed"), BUSY)
def test_stopped_in_full_flight(lab: Lab, kernel: str, seed: int) -> None:
    check_nothing_wrong(lab.image(kernel, "4", "churn", freeze="busy", seed=seed).report())


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "seed"), MORE_BUSY)
def test_stopped_in_full_flight_again(lab: Lab, kernel: str, seed: int) -> None:
    check_nothing_wrong(lab.image(kernel, "4", "churn", freeze="busy", seed=seed).report())


def crashed(lab: Lab, kernel: str, workload: str) -> Report:
    image = lab.image(kernel, "4", workload, freeze="panic", format="kdump", level=23)
    return image.report()


@pytest.mark.parametrize(("kernel", "workload"), PANIC)
def test_crashed(lab: Lab, kernel: str, workload: str) -> None:
    check_nothing_wrong(crashed(lab, kernel, workload))


@pytest.mark.parametrize(("kernel", "workload"), PANIC)
def test_fault_in_a_crash_dump_is_found(lab: Lab, kernel: str, workload: str) -> None:
    """The dump tells with BTF, too, that CPUs were idle, and idle CPUs excuse nothing."""
    image = lab.image(kernel, "4", workload, freeze="panic", format="kdump", level=23)
    prog = open_program(ImageSource(core=str(image.core), debuginfo="btf"))
    running = {cpu.cpu: cpu for cpu in read_running(image_of(prog))}
    idle = [cpu for cpu, task in running.items() if task.pid == 0]
    assert idle
    for cpu in idle:
        assert not running[cpu].busy, running[cpu]
    for cpu in running.values():
        assert cpu.functions
    memcg = find_memcg(prog, "/files/web")
    usage = memcg.memory.usage.counter
    planted = (int(usage) + 60_000).to_bytes(8, "little")

    def read(address: int, count: int, offset: int, physical: bool) -> bytes:
        return planted[offset : offset + count]

    prog.add_memory_segment(usage.address_of_(), 8, read, False)
    assert int(memcg.memory.usage.counter) == int.from_bytes(planted, "little")
    report = audit(image_of(prog))
    assert ("usage", memcg.value_(), 60_000) in {
        (finding.identity, finding.memcg, finding.difference) for finding in report.findings
    }


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "workload"), MORE_PANIC)
def test_crashed_more(lab: Lab, kernel: str, workload: str) -> None:
    check_nothing_wrong(crashed(lab, kernel, workload))


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
    found = [d for p, nid, i, d in named(report) if (p, nid, i) == (path, 0, item)]
    assert [abs((difference or 0) - PLANTED) < HALF_DONE for difference in found] == [True]


@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_that_are_off_in_full_flight_are_found(lab: Lab, plant: Plant, kernel: str) -> None:
    """Four CPUs can have left some hundred pages half done, and not ten thousand."""
    image = lab.image(kernel, "4", "churn", freeze="busy", seed=1)
    path, address = next(
        (path, address) for path, address in by_path(image.report()).items() if "group" in path
    )
    memcg = f"Object(prog, 'struct mem_cgroup *', {address:#x})"
    slots = StatReader(image_of(image.program()), ["MEMCG_KMEM", "NR_KMEM"]).slots
    [(item, slot)] = slots.items()
    state = f"per_cpu_ptr({memcg}.vmstats_percpu, 0).state[{slot}]"
    if item == "NR_KMEM":
        state = f"per_cpu_ptr({memcg}.nodeinfo[0].lruvec_stats_percpu, 0).state[{slot}]"
    planted = ((f"{memcg}.memory.usage", 10_000, "usage"), (state, 30_000, "kmem"))
    for place, pages, identity in planted:
        report = plant(image, (place, f"old + {pages}"))
        assert report.verdict == "findings"
        found = [f for f in report.findings if f.identity == identity and f.memcg == address]
        size = {"pages": 1, "bytes": 4096}
        assert [abs((f.difference or 0) / size[f.unit] - pages) < 1_000 for f in found] == [True]
