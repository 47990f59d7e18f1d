# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which obj_cgroup pays for a folio of user memory."""

from __future__ import annotations

import pytest
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcg_data import charges_node_of_folio

#: Series in which __get_obj_cgroup_from_memcg() has a parameter for the node: since 7.2.
BY_NODE = {"7.2", "7.3"}


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_the_node_of_the_folio_counts_since_7_2(lab: Lab, kernel: str) -> None:
    assert charges_node_of_folio(image_of(lab.image(kernel).program())) == (kernel in BY_NODE)
