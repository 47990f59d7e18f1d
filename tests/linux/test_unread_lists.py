# SPDX-License-Identifier: LGPL-2.1-or-later
"""Lists of free pages, and hash tables, that are not in the image."""

from __future__ import annotations

import pytest
from drgn import Program
from drgn.helpers.linux.mmzone import for_each_online_pgdat
from support.guests import DEBIAN_KERNELS, Lab
from support.missing_pages import excluded, opened

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mm_init import hash_tables
from memcg_inspect.linux.mm.show_mem import free_lists
from memcg_inspect.model import Coverage

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]


def lists(prog: Program) -> tuple[int, Coverage]:
    coverage = Coverage()
    return len(list(free_lists(image_of(prog), coverage))), coverage


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_a_zone_that_is_not_in_the_image_is_missed(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel)
    found, coverage = lists(image.program())
    assert found > 0
    assert not coverage.unreadable
    prog = opened(image.core)
    zone = next(iter(for_each_online_pgdat(prog))).node_zones[0]
    address, size = zone.address_, zone.type_.size
    prog.add_memory_segment(address, size, excluded, False)
    left, coverage = lists(prog)
    assert left < found
    assert coverage.unreadable == 1


@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_hash_tables_are_counted(lab: Lab, kernel: str) -> None:
    """Each that was read counts, and each kind of table with one that cannot be read is missed."""
    image = lab.image(kernel, "1", "idle")
    coverage = Coverage()
    pages = list(hash_tables(image_of(image.program()), coverage))
    assert pages
    assert coverage.read >= 7  # see test_hash_tables of tests/views
    assert not coverage.unreadable
    prog = opened(image.core)
    for name in ("mount_hashtable", "tcp_hashinfo"):
        symbol = prog.symbol(name)
        prog.add_memory_segment(symbol.address, 8, excluded, False)
    missed = Coverage()
    assert len(list(hash_tables(image_of(prog), missed))) < len(pages)
    assert missed.unreadable == 2
    assert missed.read < coverage.read
