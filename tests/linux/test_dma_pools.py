# SPDX-License-Identifier: LGPL-2.1-or-later
"""Pools of memory for DMA in atomic context: the kernel says their sizes when it boots."""

from __future__ import annotations

import re

import pytest
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.dma.pool import atomic_pools
from memcg_inspect.model import Coverage


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_sizes_are_those_of_the_log(lab: Lab, kernel: str) -> None:
    image, coverage = lab.image(kernel), Coverage()
    log = (image.guest / "2/dmesg").read_text()
    said = re.findall(r"DMA: preallocated (\d+) KiB .* pool for atomic allocations", log)
    found = list(atomic_pools(image_of(image.program()), coverage))
    assert sorted(end - start for start, end in found) == sorted(int(size) << 10 for size in said)
    assert coverage.read == len(found)
