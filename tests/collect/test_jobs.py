# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports that several processes made are those of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from drgn import FaultError, sizeof
from drgn.helpers.linux.percpu import per_cpu_ptr
from support.guests import GuestImage, Lab, gigantic
from support.missing_pages import without_bytes

from memcg_inspect.collect import audit, counters, ranges
from memcg_inspect.collect.counters import read_counters
from memcg_inspect.collect.ranges import jobs_of, walk_ranges
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.processes import forked_map
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.memcontrol import read_memcgs
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader, memcg_items
from memcg_inspect.linux.mm.mm_types import pages_per_piece
from memcg_inspect.linux.mm.mmzone import page_ranges
from memcg_inspect.model import Coverage
from memcg_inspect.render.documents import answer_document, report_document, to_json
from memcg_inspect.tables import Answer
from memcg_inspect.views.overview import overview
from memcg_inspect.views.pages import DIMENSIONS, pages
from memcg_inspect.views.slabinfo import slabinfo

pytestmark = pytest.mark.image


def opened(image: GuestImage, jobs: int | None) -> Image:
    prog = open_program(ImageSource(core=str(image.core), debuginfo="btf"))
    found = image_of(prog)
    found.jobs = jobs
    return found


def document(image: Image) -> str:
    """Return the JSON document of an audit without times."""
    found: dict[str, Any] = report_document(audit(image), True)
    del found["timings"]
    return json.dumps(found)


@pytest.mark.parametrize("format", ["elf", pytest.param("kdump", marks=pytest.mark.long)])
def test_a_report_is_the_same(lab: Lab, format: str) -> None:
    image = lab.image("7.3", "4", "mixed", format=format)
    alone = document(opened(image, 1))
    for jobs in (2, 5):
        assert document(opened(image, jobs)) == alone


@pytest.mark.long
def test_a_report_with_findings_and_call_sites(lab: Lab) -> None:
    """7.3-lab profiles allocations, and was stopped under load."""
    append = "sysctl.vm.mem_profiling=1"
    image = lab.image("7.3-lab", "2", "loop", freeze="busy", append=append)
    assert document(opened(image, 2)) == document(opened(image, 1))


def with_shared_counters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let processes share the counters of few memcgs, too; return what each of them was given."""
    given: list[int] = []

    def shared(image: Image, jobs: int) -> Callable[..., Any]:
        def run(read: Callable[..., Any], parts: list[list[int]]) -> Any:
            given.extend(len(part) for part in parts)
            return forked_map(image, jobs)(read, parts)

        return run

    monkeypatch.setattr(counters, "_FEW", 1)
    monkeypatch.setattr(counters, "forked_map", shared)
    return given


@pytest.mark.parametrize("kernel", ["6.1", "7.3"])
def test_processes_share_the_counters(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    image = lab.image(kernel, "4", "mixed")
    alone = document(opened(image, 1))
    given = with_shared_counters(monkeypatch)
    assert document(opened(image, 1)) == alone
    assert not given
    assert document(opened(image, 3)) == alone
    assert len(given) > 3
    memcgs = audit(opened(image, 1)).memcgs
    assert sum(given) == len(memcgs)


def test_counters_that_are_missing_from_some_parts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = lab.image("7.3", "4", "mixed")
    found = opened(image, 1)
    web = next(m for m in read_memcgs(found, Coverage()).values() if m.path == "/files/web")
    percpu = found.pointer("struct mem_cgroup *", web.address).vmstats_percpu
    copy = per_cpu_ptr(percpu, 0)

    def damaged(jobs: int) -> str:
        # Its bytes alone: what else is in the page may be needed to read anything.
        left = image_of(without_bytes(image, copy.value_(), sizeof(copy[0])))
        left.jobs = jobs
        return document(left)

    alone = damaged(1)
    assert "counters of a memcg" in alone
    assert with_shared_counters(monkeypatch) == []
    assert damaged(3) == alone


def test_counters_are_not_read_after_an_interrupt(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no process has begun is left to this one, which must return at once."""
    image = opened(lab.image("7.3", "4", "mixed"), 2)
    memcgs = read_memcgs(image, Coverage())
    reader, coverage = StatReader(image, memcg_items(image)), Coverage()
    with_shared_counters(monkeypatch)
    image.progress.stop = True
    before = image.memory.reads
    read_counters(image, reader, memcgs, coverage)
    assert image.memory.reads - before < 100
    assert coverage.unreadable == len(memcgs)
    assert {missed.reason for missed in coverage.examples} == {STOPPED}


def test_counters_are_read_though_the_size_of_memory_is_not_known(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(image: Image) -> int:
        raise FaultError("not in the image", 0x1000)

    image = opened(lab.image("7.3", "4", "mixed"), None)
    memcgs = read_memcgs(image, Coverage())
    reader, coverage = StatReader(image, memcg_items(image)), Coverage()
    monkeypatch.setattr(counters, "jobs_of", unreadable)
    for few in (counters._FEW, 1):
        monkeypatch.setattr(counters, "_FEW", few)
        read_counters(image, reader, memcgs, coverage)
    assert coverage.read > 2 * len(memcgs)
    assert coverage.unreadable == 0


@pytest.mark.parametrize(
    "command",
    [
        overview,
        slabinfo,
        lambda image: slabinfo(image, by=("cache", "node")),
        pages,
        lambda image: pages(image, by=DIMENSIONS, counters=True),
    ],
)
def test_an_answer_is_the_same(lab: Lab, command: Callable[[Image], Answer]) -> None:
    image = lab.image("7.3", "4", "mixed")
    documents = [to_json(answer_document(command(opened(image, jobs)))) for jobs in (1, 2)]
    assert documents[0] == documents[1]


def test_pages_with_a_block_that_is_larger_than_a_range(lab: Lab) -> None:
    image = gigantic(lab, "7.3")
    documents = [to_json(answer_document(pages(opened(image, jobs)))) for jobs in (1, 4)]
    assert documents[0] == documents[1]


def test_the_number_of_processes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    image = opened(lab.image("7.3", "4", "mixed"), None)
    assert jobs_of(image) == 1
    monkeypatch.setattr(ranges, "_SMALL", 1)
    monkeypatch.setattr(ranges, "available_cores", lambda: 3)
    assert jobs_of(image) == 3
    image.jobs = 2
    assert jobs_of(image) == 2
    # Processes would take memory of the machine that they read.
    monkeypatch.setattr(Image, "is_moving", True)
    assert jobs_of(image) == 1


def test_there_are_more_ranges_than_processes(lab: Lab) -> None:
    few, many = (
        list(walk_ranges(opened(lab.image("7.3", "4", "mixed"), jobs), lambda part: part))
        for jobs in (1, 2)
    )
    image = opened(lab.image("7.3", "4", "mixed"), 1)
    piece = pages_per_piece(image)
    for parts in (few, many):
        assert sum(p.end - p.start for p in parts) == sum(
            p.end - p.start for p in page_ranges(image)
        )
    assert len(few) < len(many)
    assert max(part.end - part.start for part in many) == piece
