# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests that are stopped while pcpu_alloc() has charged memory, and not recorded its owner."""

from __future__ import annotations

import pytest
from drgn import sizeof
from drgn.helpers.linux.cpumask import for_each_online_cpu, for_each_possible_cpu
from drgn.helpers.linux.sched import cpu_curr
from support.findings import named
from support.guests import BUILT_KERNELS, KERNELS, PERNODE_KERNELS, ROOT, Lab
from support.planting import Fault, Subject

from memcg_inspect.report import Row

pytestmark = pytest.mark.image

PAGE, POINTER = 4096, 8
#: ``PCPU_MIN_ALLOC_SIZE``
LEAST = 4
#: Bytes of the module's allocations for each CPU. What is charged is far from half a page.
SIZE, CPUS = 2816, 2
MODULE = (str(ROOT / "fixtures" / "modules" / "percpu_bench"), f"endless={SIZE}")
SCENE = str(ROOT / "fixtures" / "scenes" / "percpu.sh")


def charged(size: int, cpus: int) -> int:
    """Return what pcpu_obj_full_size() does."""
    return size * cpus + size // LEAST * POINTER


def not_exact(subject: Subject, *identities: str) -> dict[tuple[str, str], Row]:
    return {
        (row.identity, subject.path(row.memcg or 0)): row
        for row in subject.report.rows
        if row.status != "exact" and row.identity in identities
    }


def check_one_cause(subject: Subject, path: str, size: int) -> None:
    """All rows in flight of a memcg are one charge of a task that the guest was stopped in."""
    memcg = subject.paths[path]
    # Another CPU may be charging another memcg.
    [cause] = [cause for cause in subject.report.half_done if memcg in cause.memcgs]
    assert (cause.cause, cause.confidence) == ("half-done", "likely")
    assert (cause.memcgs, cause.amount) == ((subject.paths[path],), size)
    # memset_orig() is called by pcpu_alloc(), or pcpu_alloc_noprof(), itself.
    [function] = cause.functions
    assert function.startswith("pcpu_alloc")
    rows = not_exact(subject, "kmem", "usage", "objcg_bytes")
    signature = {(effect.identity, effect.memcg) for effect in cause.signature}
    assert {(identity, memcg) for identity, where in rows if where == path} <= signature


def allocating(lab: Lab, kernel: str, function: str) -> Subject:
    """Return a guest in which a module allocates percpu memory in the memcg ``/percpu``."""
    image = lab.image(
        kernel,
        "2",
        "idle",
        freeze=f"in:{function}",
        seed=1,
        cpus=CPUS,
        modules=(MODULE,),
        run=SCENE,
    )
    return Subject(image.program())


@pytest.mark.parametrize("kernel", [k for k in BUILT_KERNELS if k == "7.3-lab"])
@pytest.mark.parametrize("function", ["pcpu_alloc_area", "memset_orig"])
def test_percpu_memory_without_an_owner(lab: Lab, kernel: str, function: str) -> None:
    """Its pages are in the counters, and nothing that is charged shows them."""
    subject = allocating(lab, kernel, function)
    assert subject.report.verdict == "exact"
    size = charged(SIZE, CPUS)
    pages = round(size / PAGE)
    rows = not_exact(subject, "kmem", "usage", "objcg_bytes", "hierarchy")
    assert {key: row.difference for key, row in rows.items()} == {
        ("kmem", "/percpu"): pages,
        ("usage", "/percpu"): pages,
        ("objcg_bytes", "/percpu"): size - pages * PAGE,
        ("hierarchy", "/"): pages,
    }
    for row in rows.values():
        assert row.status == "in-flight"
        assert f"a percpu allocation of {SIZE:,} bytes for each CPU" in (row.reason or "")
    check_one_cause(subject, "/percpu", size)
    # The charge has a bound, and explains no other memcg. (Another task may have been charging it.)
    other = next(path for path in subject.victims() if path != "/percpu")
    for path, amount in ((other, 1), ("/percpu", 60_000)):
        fault = subject.add(subject.percpu_counter(path, "MEMCG_KMEM"), amount)
        report = subject.audit(Fault((fault,), (path,), set()))
        assert report.verdict != "exact"
        if path == "/percpu":
            assert named(report, "kmem") == {(path, None, "MEMCG_KMEM", amount + pages)}


@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
@pytest.mark.parametrize("function", ["pcpu_alloc_area", "memset_orig"])
def test_percpu_memory_that_is_not_charged_yet(lab: Lab, kernel: str, function: str) -> None:
    """By node, it is charged when it is made."""
    subject = allocating(lab, kernel, function)
    # Another CPU may be in the middle of a charge of another kind.
    assert subject.report.verdict in ("exact", "incomplete")
    assert not_exact(subject, "kmem", "usage", "objcg_bytes", "percpu", "references") == {}


@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_percpu_memory_that_is_charged_to_no_node_yet(lab: Lab, kernel: str) -> None:
    """Its bytes are counted, and it has references to the obj_cgroups of both nodes."""
    # What the function is called by: the charge of a slab object calls it, too.
    subject = allocating(lab, kernel, "pcpu_alloc_noprof/obj_cgroup_charge")
    assert subject.report.verdict == "incomplete"
    found = not_exact(subject, "kmem", "usage", "objcg_bytes", "percpu", "references")
    assert {key for key, _ in found} == {"percpu", "references"}
    counted = found["percpu", "/percpu"]
    assert counted.difference == SIZE * CPUS + SIZE // LEAST * 2 * POINTER
    assert counted.status == "unverifiable"
    references = [r for r in subject.report.rows if r.identity == "references" and r.difference]
    assert [(row.nid, row.difference) for row in references] == [(0, 1), (1, 1)]
    assert {row.status for row in references} <= {"in-flight", "unverifiable"}


@pytest.mark.long
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_memcg_that_is_being_created(lab: Lab, kernel: str) -> None:
    """Its parent pays for the percpu counters."""
    where = "in:mem_cgroup_css_alloc/pcpu_alloc_area"
    # Another CPU could be freeing the percpu counters of a memcg that was removed.
    image = lab.image(kernel, "1", "rmdirs", freeze=where, seed=1, cpus=1)
    subject = Subject(image.program())
    assert not subject.report.findings
    size = sizeof(subject.prog.type("struct memcg_vmstats_percpu"))
    rows = not_exact(subject, "kmem", "usage", "objcg_bytes")
    [path] = {path for (identity, path) in rows if identity == "objcg_bytes"}
    row = rows["objcg_bytes", path]
    cpus = len(list(for_each_possible_cpu(subject.prog)))
    assert (charged(size, cpus) - (row.difference or 0)) % PAGE == 0
    for row in rows.values():
        assert row.status == "in-flight"
        assert f"a percpu allocation of {size:,} bytes for each CPU" in (row.reason or "")
    check_one_cause(subject, path, charged(size, cpus))
    # All sizes are multiples of 4 bytes.
    objcg = subject.object("struct obj_cgroup *", rows["objcg_bytes", path].objcg or 0)
    fault = Fault((subject.add(objcg.nr_charged_bytes.counter, 1),), (path,), set())
    report = subject.audit(fault)
    assert report.verdict == "incomplete"
    [now] = [r for r in report.rows if r.identity == "objcg_bytes" and r.status != "exact"]
    assert now.status == "unverifiable"


def test_percpu_memory_that_is_freed(lab: Lab) -> None:
    """The last thing that pcpu_memcg_free_hook() changes is its counter."""
    where = "in:free_percpu/obj_cgroup_uncharge"
    # Another CPU could be freeing percpu memory, too.
    image = lab.image("7.3", "1", "churn", freeze=where, seed=4, cpus=1)
    subject = Subject(image.program())
    assert not subject.report.findings
    # Whatever is freed first, the stopped function was called with its size.
    prog = image.program(dwarf=True)
    traces = {cpu: prog.stack_trace(cpu_curr(prog, cpu)) for cpu in for_each_online_cpu(prog)}
    stopped, size = next(
        (cpu, int(frame["size"]))
        for cpu, trace in traces.items()
        if "free_percpu" in {frame.name for frame in trace}
        for frame in trace
        if frame.name == "obj_cgroup_uncharge"
    )
    cpus = len(list(for_each_possible_cpu(prog)))
    each = size // charged(LEAST, cpus) * LEAST
    assert size == charged(each, cpus)
    # Other tasks may have left other charges half done, of the same memcg, too.
    pid = int(cpu_curr(prog, stopped).pid)
    every = not_exact(subject, "percpu", "objcg_bytes")
    rows = {key: row for key, row in every.items() if row.allowance and row.allowance.pid == pid}
    [path] = {path for identity, path in rows if identity == "percpu"}
    assert rows["percpu", path].difference == size
    for (identity, _), row in rows.items():
        assert row.status == "in-flight"
        # Whole pages are in the memcg's page counter.
        beyond = size - (row.difference or 0)
        assert beyond == 0 or (identity == "objcg_bytes" and beyond % PAGE == 0)
        assert f"a percpu allocation of {each} bytes for each CPU" in (row.reason or "")
    # All sizes are multiples of 4 bytes.
    fault = subject.add(subject.percpu_counter(path, "MEMCG_PERCPU_B"), 1)
    report = subject.audit(Fault((fault,), (path,), set()))
    assert report.verdict == "incomplete"
    memcg = subject.paths[path]
    [now] = [r for r in report.rows if (r.identity, r.memcg) == ("percpu", memcg)]
    assert now.status == "unverifiable"
