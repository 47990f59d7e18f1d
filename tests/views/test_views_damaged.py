# SPDX-License-Identifier: LGPL-2.1-or-later
"""Views of dumps that lack pages report what is missing and invent no values."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from drgn.helpers.linux.mm import virt_to_pfn
from drgn.helpers.linux.pid import for_each_task
from support.guests import KERNELS, GuestImage, Lab
from support.missing_pages import ask_without, slab_pages
from support.printed import answer_text
from support.schemas import checked
from support.views import VIEWS, ask

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_types import scan_pages
from memcg_inspect.linux.mm.slab import SlabReader
from memcg_inspect.render.documents import answer_document, to_json
from memcg_inspect.tables import Answer, NotRead

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

LONG = pytest.mark.long


@lru_cache(maxsize=20)
def whole(core: Path, *arguments: str) -> Answer:
    """Return the answer on the image with all its pages."""
    answer = ask(GuestImage(core).program(), *arguments)
    assert answer.is_whole
    return answer


def shown(answer: Answer) -> Answer:
    """Return some rows of each table, those with an unreadable value first."""
    tables = (
        replace(
            t,
            rows=sorted(
                t.rows, key=lambda r: not any(isinstance(v, NotRead) for v in t.values(r).values())
            ),
        )
        for t in answer.tables
    )
    return replace(answer, tables=tuple(replace(t, rows=t.rows[:30]) for t in tables))


def check(image: GuestImage, pages: Collection[int], arguments: tuple[str, ...]) -> bool:
    """Run a view on an image without some pages; return whether the answer is complete."""
    answer, left = ask_without(image, pages, lambda damaged: ask(damaged.prog, *arguments))
    assert len(left) > 0.8 * len(pages)
    document = checked(json.loads(to_json(answer_document(answer))))
    assert answer_text(shown(answer))
    truth = whole(image.core, *arguments)
    if answer.is_whole:
        assert [t.rows for t in answer.tables] == [t.rows for t in truth.tables]
    else:
        assert document["whole"] is False
        VIEWS[arguments](answer, truth)
    return answer.is_whole


@pytest.mark.parametrize("share", [0.02, pytest.param(0.0005, marks=LONG)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_pages_of_slabs_may_be_missing(lab: Lab, kernel: str, share: float) -> None:
    image, chance = lab.image(kernel, "4", "mixed"), random.Random(1)
    gone = [pfn for pfn in slab_pages(image.program()) if chance.random() < share]
    # One with pointers to obj_cgroups is always among them.
    gone.append(page_of_vector(image))
    whole_answers = {arguments[0]: check(image, gone, arguments) for arguments in VIEWS}
    assert not whole_answers["slabinfo"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=LONG) for n in range(1, 8))])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_pages_at_all_may_be_missing(lab: Lab, kernel: str, seed: int) -> None:
    image = lab.image(kernel, "4", "mixed")
    gone = random.Random(seed).sample(range(1 << 18), 300)
    # One with a task is always among them.
    *_, task = for_each_task(image.program())
    gone.append(virt_to_pfn(task).value_())
    whole_answers = {arguments[0]: check(image, gone, arguments) for arguments in VIEWS}
    assert not whole_answers["tasks"]


def page_of_vector(image: GuestImage) -> int:
    """Return the page frame number of a vector of ``obj_cgroup`` pointers in use."""
    slabs = SlabReader(image_of(image.program()))
    vector = next(
        slab.vector.address
        for piece in scan_pages(image_of(image.program()))
        for slab in map(slabs.slab, piece.slabs)
        if slab is not None and slab.vector is not None and slab.charged
    )
    return virt_to_pfn(image.program(), vector).value_()
