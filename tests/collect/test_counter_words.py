# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which words of memory are read of counters that are wrong."""

from __future__ import annotations

import pytest
from support.findings import by_path
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.collect.counter_words import find_words
from memcg_inspect.image.image import image_of
from memcg_inspect.report import Finding

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:]),
]


def wrong(memcg: int | None, nid: int | None, item: str) -> Finding:
    return Finding("slab", "counter-above-objects", memcg, None, nid, item, "bytes", 8, "", "proof")


def test_those_of_the_node_and_the_memcg_itself(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel)
    memcg = min(address for path, address in by_path(image.report()).items() if path != "/")
    found = find_words(image_of(image.program()), [wrong(memcg, 1, "NR_SLAB_UNRECLAIMABLE_B")])
    assert {word.memcg for word in found} == {memcg}
    assert {word.nid for word in found} == {None, 1}
    nodes = {word.item for word in found if word.nid == 1}
    assert "NR_SLAB_UNRECLAIMABLE_B" in nodes


def test_those_of_a_node_are_of_no_memcg(lab: Lab, kernel: str) -> None:
    image = image_of(lab.image(kernel).program())
    found = find_words(image, [wrong(None, 2, "NR_KERNEL_STACK_KB")])
    assert {(word.memcg, word.nid) for word in found} == {(None, 2)}
