# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Dumps that lack pages at random: views say what they could not read, and make nothing up.

What they do say is what they say of the whole dump.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from drgn import FaultError, Program
from drgn.helpers.linux.mm import follow_phys
from support.guests import KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.model import ImageError
from memcg_inspect.tables import Answer, NotRead, Value
from memcg_inspect.views.drift import drift
from memcg_inspect.views.rss import rss

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

#: The views, and the columns that tell rows apart.
VIEWS: list[tuple[Callable[[Program], Answer], tuple[str, str]]] = [
    (lambda prog: rss(image_of(prog), True), ("pid", "item")),
    (lambda prog: drift(image_of(prog), True), ("memcg_address", "item")),
]
#: What depends on names that may be missing, or says that something is.
MAY_DIFFER = {"memcg", "status"}


def rows_of(answer: Answer, key: tuple[str, str]) -> dict[tuple[Value, ...], dict[str, Value]]:
    rows = [answer.tables[0].values(row) for row in answer.tables[0].rows]
    return {tuple(row[name] for name in key): row for row in rows}


def excluded(address: int, count: int, offset: int, physical: bool) -> bytes:
    raise FaultError("Excluded page", address)


def leave_out(prog: Program, seed: int, share: float) -> None:
    """Take away pages, but none of the kernel's own image, in which the types are."""
    start, end = prog.symbol("_stext").address, prog.symbol("_end").address
    first = follow_phys(prog["init_mm"].address_of_(), start).value_()
    chance, shift = random.Random(seed), mem_map(image_of(prog)).page_shift
    for pages in page_ranges(image_of(prog)):
        for pfn in range(*pages):
            address = pfn << shift
            if chance.random() < share and not first <= address < first + end - start:
                prog.add_memory_segment(address, 1 << shift, excluded, True)


@pytest.mark.parametrize("share", [0.0003, 0.005])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_pages_may_be_missing(lab: Lab, kernel: str, share: float) -> None:
    image = lab.image(kernel, "4", "rss", cpus=8)
    whole = [rows_of(view(image.program()), key) for view, key in VIEWS]
    answered = incomplete = 0
    for seed in range(3):
        prog = open_program(ImageSource(core=str(image.core), debuginfo="btf"))
        leave_out(prog, seed, share)
        for (view, key), truth in zip(VIEWS, whole, strict=True):
            try:
                with as_image_errors():
                    answer = view(prog)
            except ImageError as error:
                assert "nothing can be read without" in str(error)
                continue
            answered += 1
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
    assert answered >= 3
    # Of few pages that are missing, none may be one that is looked at.
    assert incomplete or share < 0.001
