# SPDX-License-Identifier: LGPL-2.1-or-later
"""A walk that is stopped returns what it has read, and nothing of it is kept."""

from __future__ import annotations

import pytest
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_what_was_read_is_returned_and_not_kept(lab: Lab, kernel: str) -> None:
    image = image_of(lab.image(kernel).own_program())
    image.keeps_walks = True  # as in an interactive session
    image.progress.stop = True
    part = collect(image)
    assert isinstance(part, Snapshot)
    image.progress.stop = False
    whole = collect(image)
    assert whole is not part
    assert len(whole.ledger) > len(part.ledger)
    assert collect(image) is whole
