# SPDX-License-Identifier: LGPL-2.1-or-later
"""What an audit reads, and how many Objects it makes, by stage: as much as there is, not more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from drgn import Object
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.image.memory import PIECE
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges, possible_nodes
from memcg_inspect.report import Report

#: Bytes between two vectors that are read at once, at most.
PAGE = 4096

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


class Made:
    """Objects that were made of types and of variables."""

    def __init__(self) -> None:
        self.pointers = self.variables = 0


@contextmanager
def counted() -> Iterator[Made]:
    made, pointer, variable = Made(), Image.pointer, Image.object

    def count_pointer(self: Image, type_name: str, address: int) -> Object:
        made.pointers += 1
        return pointer(self, type_name, address)

    def count_variable(self: Image, name: str, filename: str | None = None) -> Object:
        made.variables += 1
        return variable(self, name, filename)

    with (
        mock.patch.object(Image, "pointer", count_pointer),
        mock.patch.object(Image, "object", count_variable),
    ):
        yield made


def sizes(image: Image, report: Report) -> dict[str, int]:
    frames = mem_map(image)
    pages = sum(end - start for start, end in page_ranges(image))
    return {
        "map": pages * frames.size,
        "pieces": -(-pages * frames.size // PIECE) + len(page_ranges(image)),
        "slabs": sum(usage.slabs for usage in report.slab_usage),
        "objects": sum(usage.objects for usage in report.slab_usage),
        "cells": len(report.memcgs) * (1 + len(possible_nodes(image))),
    }


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_each_stage_reads_what_there_is_once(lab: Lab, kernel: str) -> None:
    image = image_of(lab.image(kernel, "4", "mixed").program())
    with counted() as made:
        report = audit(image)
    there, reads = sizes(image, report), report.reads
    assert report.verdict == "exact"
    # A few structures of each memcg and of each memcg on a node, and the arrays of their counters.
    assert reads["memcgs"].reads <= 4 * there["cells"]
    assert reads["counters"].reads <= 2 * there["cells"]
    # The memory map once, and one vector of each slab. A few caches are read object by object.
    assert reads["pages"].reads <= there["pieces"] + 2 * there["slabs"]
    vectors = 64 * there["objects"] + PAGE * there["slabs"]
    assert there["map"] <= reads["pages"].bytes <= there["map"] + vectors
    for stage in ("judge", "evidence", "diagnosis"):
        assert reads[stage].reads == 0
    # There is no Object for a page, for a slab object, or for a counter of a CPU.
    assert 20 * (made.pointers + made.variables) < there["objects"]
