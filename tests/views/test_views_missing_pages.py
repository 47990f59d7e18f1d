# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Dumps that lack random pages: views say what they could not read.

All values that they show are those of the whole dump.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from drgn import Program
from drgn.helpers.linux.mm import follow_phys
from support.guests import KERNELS, Lab
from support.missing_pages import ask_without

from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.tables import Answer, NotRead, Value
from memcg_inspect.views.drift import drift
from memcg_inspect.views.rss import rss

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

#: The views, and the columns that tell rows apart.
VIEWS: list[tuple[Callable[[Image], Answer], tuple[str, str]]] = [
    (lambda image: rss(image, True), ("pid", "item")),
    (lambda image: drift(image, True), ("memcg_address", "item")),
]
#: What depends on names that may be missing, or says that something is.
MAY_DIFFER = {"memcg", "status"}


def rows_of(answer: Answer, key: tuple[str, str]) -> dict[tuple[Value, ...], dict[str, Value]]:
    rows = [answer.tables[0].values(row) for row in answer.tables[0].rows]
    return {tuple(row[name] for name in key): row for row in rows}


def chosen(prog: Program, seed: int, share: float) -> set[int]:
    """Return pages at random, but none of the kernel's own image, in which the types are."""
    start, end = prog.symbol("_stext").address, prog.symbol("_end").address
    shift = mem_map(image_of(prog)).page_shift
    first = follow_phys(prog["init_mm"].address_of_(), start).value_() >> shift
    last, chance = first + (end - start >> shift), random.Random(seed)
    return {
        pfn
        for pages in page_ranges(image_of(prog))
        for pfn in range(*pages)
        if chance.random() < share and not first <= pfn <= last
    }


@pytest.mark.parametrize("share", [0.0003, 0.005])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_pages_may_be_missing(lab: Lab, kernel: str, share: float) -> None:
    image = lab.image(kernel, "4", "rss", cpus=8)
    whole = [rows_of(view(image_of(image.program())), key) for view, key in VIEWS]
    incomplete = 0
    for seed in range(3):
        gone = chosen(image.program(), seed, share)
        for (view, key), truth in zip(VIEWS, whole, strict=True):
            answer, left = ask_without(image, gone, view)
            assert len(left) > 0.8 * len(gone)
            incomplete += not answer.is_whole
            for place, row in rows_of(answer, key).items():
                known = {n: v for n, v in row.items() if not isinstance(v, NotRead)}
                if place in truth:
                    same = {n: v for n, v in truth[place].items() if n in known}
                    assert {n: v for n, v in known.items() if n not in MAY_DIFFER} == {
                        n: v for n, v in same.items() if n not in MAY_DIFFER
                    }
                else:  # one that is left out if it is known to be 0
                    assert len(known) < len(row)
    # Of few pages that are missing, the views may need none.
    assert incomplete or share < 0.001
