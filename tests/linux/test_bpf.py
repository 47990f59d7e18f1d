# SPDX-License-Identifier: LGPL-2.1-or-later
"""
References of BPF maps to obj_cgroups.

The workload ``bpfmaps`` makes a map of each type that the kernel has, in a memcg of its own.
"""

from __future__ import annotations

import pytest
from support.findings import by_path
from support.guests import KERNELS, GuestImage, Lab, Plant

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.lib.list import idr_entries
from memcg_inspect.report import Report, Row

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", KERNELS),
]

#: Allocators of maps (``bpf_mem_alloc_init()``), which hold a reference each besides that of the
#: map.
ALLOCATORS = {"hash": 1, "percpu_hash": 2, "rhash": 1, "array": 0, "queue": 0, "ringbuf": 0}


def rows_of(report: Report, name: str) -> list[Row]:
    """Return the rows of ``references`` of ``/bpfmaps/NAME``."""
    memcg = by_path(report)[f"/bpfmaps/{name}"]
    return [row for row in report.rows if (row.identity, row.memcg) == ("references", memcg)]


def map_of(image: GuestImage, report: Report, name: str) -> tuple[int, int]:
    """Return the map of a memcg, ``struct bpf_map *``, and its obj_cgroup."""
    objcgs = {row.objcg for row in rows_of(report, name)}
    drgn_image = image_of(image.program())
    faults: list[Exception] = []
    for found in idr_entries(
        drgn_image, "struct bpf_map", drgn_image.object("map_idr"), faults.append
    ):
        if found.objcg.value_() in objcgs:
            return found.value_(), found.objcg.value_()
    raise AssertionError(f"no map of {name}")


def leaked(objcg: int) -> tuple[str, str]:
    """Return a change of the image: one more reference to an obj_cgroup."""
    return f"Object(prog, 'struct obj_cgroup *', {objcg:#x}).refcnt.data.count.counter", "old + 1"


def test_exact(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel, "2", "bpfmaps").report()
    assert (report.verdict, report.findings) == ("exact", ())
    names = {path.rpartition("/")[2] for path in by_path(report) if path.startswith("/bpfmaps/")}
    assert len(names) >= 15
    assert ("rhash" in names) == kernel.startswith("7.")


def test_each_allocator_holds_a_reference(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel, "2", "bpfmaps").report()
    for name, allocators in ALLOCATORS.items():
        if f"/bpfmaps/{name}" in by_path(report):
            held = sum(row.found.get("bpf", 0) for row in rows_of(report, name))
            assert held == 1 + allocators, name


def test_a_leaked_reference(lab: Lab, plant: Plant, kernel: str) -> None:
    """One more reference to the obj_cgroup of a map of a known type is a finding."""
    image = lab.image(kernel, "2", "bpfmaps")
    _, objcg = map_of(image, image.report(), "hash")
    report = plant(image, leaked(objcg))
    assert [(f.identity, f.kind, f.objcg) for f in report.findings] == [
        ("references", "unknown-references", objcg)
    ]


def test_a_type_of_maps_that_is_not_known(lab: Lab, plant: Plant, kernel: str) -> None:
    """It may hold references that are not found. Rows of other memcgs do not suffer."""
    image = lab.image(kernel, "2", "bpfmaps")
    bpf_map, objcg = map_of(image, image.report(), "hash")
    _, other = map_of(image, image.report(), "array")
    unknown = (f"Object(prog, 'struct bpf_map *', {bpf_map:#x}).map_type", "1000")
    assert plant(image, unknown).verdict == "exact"
    report = plant(image, unknown, leaked(objcg), leaked(other))
    assert [(f.identity, f.objcg) for f in report.findings] == [("references", other)]
    [row] = [row for row in rows_of(report, "hash") if row.status != "exact"]
    assert (row.status, row.difference) == ("unverifiable", 1)
    assert row.reason == "BPF maps of type 1000 may hold references that this program does not find"
