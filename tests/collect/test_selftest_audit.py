# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A module makes each kind of charge on each of eight nodes, six of them without CPUs. The audit
finds what the module says it holds, before, during and after its work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from labkit.selftest import MEMCG, held, selftest
from support.guests import BUILT_KERNELS, PERNODE_KERNELS, GuestImage

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.report import Report

# Images of these guests take half a minute each.
pytestmark = [pytest.mark.image, pytest.mark.long]

KERNELS = [kernel for kernel in (*BUILT_KERNELS, *PERNODE_KERNELS) if kernel.startswith("7.3")]
PERNODE = "7.3-pernode"
CPULESS = range(2, 8)
ByNode = dict[str, dict[int, int]]


class StageImage(NamedTuple):
    """An image of the module's work."""

    image: GuestImage
    report: Report
    snapshot: Snapshot

    @property
    def memcg(self) -> int:
        return next(m.address for m in self.snapshot.memcgs.values() if m.path == MEMCG)

    def charged(self, memcg: int) -> ByNode:
        """Return the bytes that a memcg pays for, by kind and node."""
        found: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for kind, detail in (("percpu", "data"), ("kmem", "other"), ("kmem", "vmalloc")):
            by_node = self.snapshot.by_node(kind, detail)  # type: ignore[arg-type]
            for (payer, nid), amount in by_node.items():
                if payer == memcg and amount.bytes:
                    found[detail][nid] += amount.bytes
        for usage in self.report.slab_usage:
            if usage.cache == "pernode_selftest" and usage.charged:
                found["objects"][usage.nid] += usage.charged
        return {name: dict(nodes) for name, nodes in found.items()}

    def held(self) -> ByNode:
        """Return the bytes that the module says it holds, by kind and node."""
        names = {"percpu": "data", "pages": "other", "vmalloc": "vmalloc", "slab": "objects"}
        found: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for kind, size, nodes in held(self.image.core):
            for nid, bytes_ in nodes.items():
                found[names[kind]][nid] += bytes_ // size if kind == "slab" else bytes_
        return {name: dict(nodes) for name, nodes in found.items()}

    def metadata(self) -> dict[int, int]:
        """Return the bytes of the memcg's percpu vectors, by node."""
        found = self.snapshot.by_node("percpu", "metadata")
        return {nid: a.bytes for (payer, nid), a in found.items() if payer == self.memcg}


def take(tmp_path: Path, kernel: str, stage: str) -> StageImage:
    image = GuestImage(selftest(tmp_path, kernel, stage))
    return StageImage(image, image.report(), collect(image_of(image.program())))


def check_exact(taken: StageImage) -> None:
    """Check that every node was charged exactly what is on it."""
    report = taken.report
    assert (report.findings, report.verdict) == ((), "exact")
    if report.image.accounting == "kmem-per-node":
        rows = [r for r in report.rows if r.identity == "kmem" and r.memcg == taken.memcg]
        assert {row.nid for row in rows} == set(range(8))
        assert report.follows is not None
        assert set(report.follows.values()) <= {"physical", "both"}
        for cell in report.skew:
            if cell.kind in ("slab", "kmem", "percpu") and cell.bytes:
                assert cell.charged_nid == cell.backing_nid


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stage", ["all", "half"])
def test_what_is_held_is_what_is_charged(kernel: str, stage: str, tmp_path: Path) -> None:
    taken = take(tmp_path, kernel, stage)
    check_exact(taken)
    said = taken.held()
    assert set(said) == {"data", "other", "vmalloc", "objects"}
    assert set(said["other"]) == set(said["objects"]) == set(range(8))
    assert taken.charged(taken.memcg) == said


def test_each_byte_of_metadata_is_charged_where_it_is(tmp_path: Path) -> None:
    taken = take(tmp_path, PERNODE, "cpuless")
    check_exact(taken)
    assert taken.charged(taken.memcg) == taken.held()
    found = taken.metadata()
    assert any(found.get(nid, 0) for nid in CPULESS), found
    # for each 4 bytes of a CPU's share of an allocation, one element
    sizes = sum(size for kind, size, _ in held(taken.image.core) if kind == "percpu")
    assert sum(found.values()) == sizes // 4 * PercpuReader(image_of(taken.image.program())).element
    # all of it is in the counters of those nodes, whose rows are exact: no other memory of
    # the memcg could stand in for it
    rows = {
        row.nid: row
        for row in taken.report.rows
        if row.identity == "kmem" and row.memcg == taken.memcg
    }
    for nid, size in found.items():
        assert sum(rows[nid].found.values()) * 4096 >= size


@pytest.mark.parametrize("kernel", KERNELS)
def test_before(kernel: str, tmp_path: Path) -> None:
    taken = take(tmp_path, kernel, "before")
    check_exact(taken)
    assert (taken.held(), taken.charged(taken.memcg), taken.metadata()) == ({}, {}, {})


def test_after(tmp_path: Path) -> None:
    before, after = take(tmp_path, PERNODE, "before"), take(tmp_path, PERNODE, "gone")
    check_exact(after)
    assert (after.held(), after.charged(after.memcg), after.metadata()) == ({}, {}, {})
    # what is left of pages waits in the stock of each CPU, and with the obj_cgroups
    for row in after.report.rows:
        if row.identity == "kmem" and row.memcg == after.memcg:
            assert sum(row.found.values()) <= len(before.snapshot.stocks), row


def test_after_its_memcg_was_removed(tmp_path: Path) -> None:
    taken = take(tmp_path, PERNODE, "removed")
    assert (taken.report.findings, taken.report.verdict) == ((), "exact")
    paths = {m.path: m for m in taken.snapshot.memcgs.values() if m.state == "online"}
    assert MEMCG not in paths
    assert taken.charged(paths["/self"].address) == {}
    assert taken.held() == {}
