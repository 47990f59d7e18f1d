# SPDX-License-Identifier: LGPL-2.1-or-later
"""Views of dumps that lack pages: nothing is made up, and nothing is lost without a word."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import drgn
import pytest
from support.guests import KERNELS, GuestImage, Lab
from support.missing_pages import excluded, opened, slab_pages
from support.printed import answer_text
from support.views import VIEWS, ask

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import ImageError
from memcg_inspect.render.documents import answer_document, to_json
from memcg_inspect.tables import Answer, NotRead

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

LONG = pytest.mark.long


@lru_cache(maxsize=20)
def whole(core: Path, *arguments: str) -> Answer:
    answer = ask(GuestImage(core).program(), *arguments)
    assert answer.is_whole
    return answer


def shown(answer: Answer) -> Answer:
    """Some rows of each table, those with something that was not read first."""
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


def check(prog: drgn.Program, image: GuestImage, arguments: tuple[str, ...]) -> bool | None:
    """Whether the answer is whole; ``None`` if there is none."""
    try:
        answer = ask(prog, *arguments)
    except ImageError as error:
        assert "nothing can be read without" in str(error)
        return None
    document = json.loads(to_json(answer_document(answer)))
    assert answer_text(shown(answer))
    truth = whole(image.core, *arguments)
    if answer.is_whole:
        assert [t.rows for t in answer.tables] == [t.rows for t in truth.tables]
    else:
        assert document["whole"] is False
        VIEWS[arguments](answer, truth)
    return answer.is_whole


def check_all(image: GuestImage, pages: Iterable[int]) -> Counter[bool | None]:
    """Ask everything of an image without some pages; how it ended."""
    prog, frames = opened(image.core), mem_map(image_of(image.program()))
    for pfn in pages:
        prog.add_memory_segment(pfn << frames.page_shift, frames.page_size, excluded, True)
    return Counter(check(prog, image, arguments) for arguments in VIEWS)


@pytest.mark.parametrize("share", [0.02, pytest.param(0.0005, marks=LONG)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_pages_of_slabs_may_be_missing(lab: Lab, kernel: str, share: float) -> None:
    image, chance = lab.image(kernel, "4", "mixed"), random.Random(1)
    ended = check_all(
        image, [pfn for pfn in slab_pages(image.program()) if chance.random() < share]
    )
    assert ended.total() == len(VIEWS)
    assert ended[False] >= 4 or share < 0.01  # of few pages, none may matter


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=LONG) for n in range(1, 8))])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_pages_at_all_may_be_missing(lab: Lab, kernel: str, seed: int) -> None:
    image = lab.image(kernel, "4", "mixed")
    ended = check_all(image, random.Random(seed).sample(range(1 << 18), 300))
    assert ended.total() == len(VIEWS)
