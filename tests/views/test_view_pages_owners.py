# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages that nothing marks have the owners that the workload ``buffers`` gave them, and those that the
guest's own files tell.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest
from support.guests import DEBIAN_KERNELS, GuestImage, Lab
from support.views import number, rows

from memcg_inspect.image.image import image_of
from memcg_inspect.tables import Answer
from memcg_inspect.views.pages import pages

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

PAGE = 4096
#: What fixtures/workloads/buffers.c makes.
TRACE_BYTES, PERF_PAGES, PIPE_PAGES = 1000 << 10, 64 + 1, 48
#: ``BUF_PAGE_SIZE``: bytes of a page that events can have.
TRACE_PAGE = PAGE - 16


def buffers(lab: Lab, kernel: str) -> GuestImage:
    # Secret memory is off by default up to 6.4.
    return lab.image(kernel, "2", "buffers", append="secretmem.enable=1")


@lru_cache(maxsize=4)
def asked(core: Path, by: tuple[str, ...]) -> Answer:
    return pages(image_of(GuestImage(core).program()), by)


def by_kind(answer: Answer, memcg: str | None = None) -> Counter[str]:
    """Return the bytes of each kind, paid by a memcg or in all."""
    found: Counter[str] = Counter()
    for row in rows(answer):
        if memcg is None:
            found[str(row["kind"])] += number(row, "bytes")
        elif row["memcg"] == memcg:
            found[str(row["kind"])] += number(row, "paid")
    return found


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_ring_buffers(lab: Lab, kernel: str) -> None:
    with_buffers, without = (
        by_kind(asked(image.core, ("kind",)))
        for image in (buffers(lab, kernel), lab.image(kernel, "2", "idle"))
    )
    assert without["perf"] == 0
    assert with_buffers["perf"] == PERF_PAGES * PAGE
    # One CPU on each node. Before, each has the least that a ring can have, two pages.
    more = 2 * (-(-TRACE_BYTES // TRACE_PAGE) - 2)
    assert with_buffers["trace"] - without["trace"] == more * PAGE
    assert abs(with_buffers["unknown"] - without["unknown"]) < 40 * PAGE


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_pipes(lab: Lab, kernel: str) -> None:
    answer = asked(buffers(lab, kernel).core, ("kind", "memcg"))
    paid = by_kind(answer, "/buffers/pipe")
    # Since 7.3, a pipe keeps up to 8 pages for the next write.
    assert PIPE_PAGES <= paid["pipe"] // PAGE <= PIPE_PAGES + 8
    assert paid["kmem"] == 0
