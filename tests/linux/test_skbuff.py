# SPDX-License-Identifier: LGPL-2.1-or-later
"""Buffers of AF_UNIX sockets in lists that are not in the image."""

from __future__ import annotations

import pytest
from drgn.helpers.linux.net import for_each_net
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.net.skbuff import unix_socket_pages
from memcg_inspect.model import Coverage


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_a_namespace_without_its_table(lab: Lab, kernel: str) -> None:
    prog, coverage = opened(lab.image(kernel).core), Coverage()
    net = next(for_each_net(prog))
    prog.add_memory_segment(net.unx.table.buckets.address_ or 0, 8, excluded, False)
    list(unix_socket_pages(image_of(prog), coverage))
    assert coverage.unreadable == 1
    assert [(one.what, one.address) for one in coverage.examples] == [
        ("AF_UNIX sockets", net.unx.table.buckets.address_)
    ]
