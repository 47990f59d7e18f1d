# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports that several processes made are those of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.guests import GuestImage, Lab, gigantic

from memcg_inspect.collect import audit, ranges
from memcg_inspect.collect.ranges import jobs_of, walk_ranges
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mm_types import pages_per_piece
from memcg_inspect.linux.mm.mmzone import page_ranges
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
