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


def test_what_is_not_in_the_image_is_left_out(lab: Lab, kernel: str) -> None:
    """The words of the root are read, and none of a memcg that is missing, or of no node."""
    image = lab.image(kernel)
    root = by_path(image.report())["/"]
    findings = [
        wrong(0x1000, 1, "NR_SLAB_UNRECLAIMABLE_B"),
        wrong(root, None, "MEMCG_SOCK"),
        wrong(None, None, "NR_FREE_PAGES"),
        wrong(None, -1, "NR_FREE_PAGES"),
    ]
    found = find_words(image_of(image.program()), findings)
    assert {(word.memcg, word.nid) for word in found} == {(root, None)}


def test_memcgs_with_most_findings_come_first(lab: Lab, kernel: str) -> None:
    """There may be too many: 64 are read. One that is not in the image takes a place, too."""
    image = lab.image(kernel)
    root = by_path(image.report())["/"]
    few = [wrong(0x1000 * number, 1, "MEMCG_SOCK") for number in range(1, 65)]
    asked = [*few, wrong(root, 1, "MEMCG_SOCK")]
    assert find_words(image_of(image.program()), asked) == []
    more = [*asked, wrong(root, 2, "MEMCG_SOCK")]
    found = find_words(image_of(image.program()), more)
    assert {(word.memcg, word.nid) for word in found} == {(root, None), (root, 1), (root, 2)}
    assert find_words(image_of(image.program()), asked[1:]) != []
