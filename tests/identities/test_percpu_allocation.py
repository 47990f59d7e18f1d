# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests that are stopped while pcpu_alloc() has charged memory, and not recorded its owner."""

from __future__ import annotations

import pytest
from support.findings import named
from support.guests import ROOT, Lab
from support.planting import Fault, Subject

#: Bytes of the allocation for each CPU. What is charged is far from half a page.
SIZE, CPUS, PAGE = 2816, 2, 4096
#: With the pointers to obj_cgroups: one for each PCPU_MIN_ALLOC_SIZE. See pcpu_obj_full_size().
CHARGED = SIZE * CPUS + SIZE // 4 * 8
MODULE = (str(ROOT / "fixtures" / "modules" / "percpu_bench"), f"endless={SIZE}")
SCENE = str(ROOT / "fixtures" / "scenes" / "percpu.sh")


def stopped(lab: Lab, kernel: str, function: str) -> Subject:
    more = {"modules": (MODULE,), "run": SCENE, "seed": 1, "cpus": CPUS}
    return Subject(lab.image(kernel, "2", "idle", freeze=f"in:{function}", **more).program())


@pytest.mark.image
@pytest.mark.parametrize("function", ["pcpu_alloc_area", "memset_orig"])
def test_percpu_memory_without_an_owner(lab: Lab, function: str) -> None:
    """Its pages are in the counters, and nothing that is charged shows them."""
    subject = stopped(lab, "7.3-lab", function)
    report = subject.report
    assert report.verdict == "incomplete"
    pages = round(CHARGED / PAGE)
    rest = CHARGED - pages * PAGE
    unknown = {
        (row.identity, subject.path(row.memcg or 0)): abs(row.difference or 0)
        for row in report.rows
        if row.status == "unverifiable"
    }
    assert unknown == {
        ("kmem", "/percpu"): pages,
        ("usage", "/percpu"): pages,
        ("objcg_bytes", "/percpu"): abs(rest),
        ("hierarchy", "/"): pages,
    }
    # The task points to this memcg only, and its charge has a bound.
    other = next(path for path in subject.victims() if path != "/percpu")
    for path, amount in ((other, 1), ("/percpu", 60_000)):
        fault = subject.add(subject.percpu_counter(path, "MEMCG_KMEM"), amount)
        found = named(subject.audit(Fault((fault,), (path,), set())), "kmem")
        own = pages if path == "/percpu" else 0
        assert found == {(path, None, "MEMCG_KMEM", amount + own)}


@pytest.mark.image
@pytest.mark.parametrize("function", ["pcpu_alloc_area", "memset_orig"])
def test_percpu_memory_without_an_owner_by_node(lab: Lab, function: str) -> None:
    report = stopped(lab, "7.3-pernode", function).report
    assert not report.findings
    assert report.verdict == "incomplete"
