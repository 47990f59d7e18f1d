# SPDX-License-Identifier: LGPL-2.1-or-later
"""Page counters of memcgs on cgroup v1 and v2, in memory made by hand."""

from __future__ import annotations

import pytest
from drgn import FaultError, offsetof
from support.layouts import MadeImage

from memcg_inspect.linux.mm.memcontrol import on_default_hierarchy
from memcg_inspect.linux.mm.page_counter import (
    memory_usage,
    page_counter_usage,
    page_counter_words,
    page_counters,
)
from memcg_inspect.model_counters import CounterWord

MEMCG, MISSING = 0xFFFF888030000000, 0xFFFF888077700000
V1 = "struct page_counter kmem; struct page_counter tcpmem;"


def kernel(is_v2: bool, of_v1: str = V1) -> MadeImage:
    """Return a kernel with a memcg that has 7 pages, and 5 in swap space."""
    image = MadeImage()
    image.declare(
        f"""
        struct atomic_long {{ long counter; }};
        struct page_counter {{ long watermark; struct atomic_long usage; }};
        struct mem_cgroup {{ long id; struct page_counter memory;
                            union {{ struct page_counter swap; struct page_counter memsw; }};
                            {of_v1} }};
        """
    )
    image.given[on_default_hierarchy] = is_v2
    image.make("struct mem_cgroup", MEMCG, {"memory.usage.counter": 7, "swap.usage.counter": 5})
    return image


@pytest.mark.parametrize(
    ("is_v2", "of_v1", "names"),
    [
        (True, V1, ("memory", "swap")),
        (True, "", ("memory", "swap")),
        (False, V1, ("memory", "memsw", "kmem", "tcpmem")),
        (False, "", ("memory", "memsw")),
    ],
)
def test_counters_that_are_in_use(is_v2: bool, of_v1: str, names: tuple[str, ...]) -> None:
    """``swap`` and ``memsw`` share their memory. CONFIG_MEMCG_V1 adds two."""
    image = kernel(is_v2, of_v1)
    assert page_counters(image) == names
    memcg = image.pointer("struct mem_cgroup *", MEMCG)
    assert [page_counter_usage(memcg, name) for name in names[:2]] == [7, 5]
    assert memory_usage(memcg) == 7
    type_ = image.type("struct mem_cgroup")
    assert list(page_counter_words(image, memcg)) == [
        CounterWord("page_counter", f"{name}.usage", MEMCG + offsetof(type_, name) + 8, 8)
        for name in names
    ]


def test_a_memcg_that_is_not_in_the_image() -> None:
    memcg = kernel(True).pointer("struct mem_cgroup *", MISSING)
    with pytest.raises(FaultError):
        memory_usage(memcg)
