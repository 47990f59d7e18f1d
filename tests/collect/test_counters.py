# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is read of each memcg, and memcgs that are not in the image."""

from __future__ import annotations

import pytest
from support.findings import by_path
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.collect.counters import read_swap_entries
from memcg_inspect.image.image import image_of
from memcg_inspect.model import Coverage


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_swap_entries_of_memcgs(lab: Lab, kernel: str) -> None:
    """A memcg whose ID is not in the image is missed, and has no number."""
    image, coverage = lab.image(kernel), Coverage()
    memcgs = list(by_path(image.report()).values())
    program = image.program()
    ids = {int(program["root_mem_cgroup"].id.id): 7}
    found = read_swap_entries(image_of(program), [*memcgs, 0x1000], ids, coverage)
    root = program["root_mem_cgroup"].value_()
    assert found == {memcg: 7 if memcg == root else 0 for memcg in memcgs}
    assert coverage.unreadable == 1
