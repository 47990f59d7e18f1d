# SPDX-License-Identifier: LGPL-2.1-or-later
"""The page tables of the kernel lead to the page frames that drgn's own walk finds."""

from __future__ import annotations

import pytest
from drgn import FaultError
from drgn.helpers.linux.mm import follow_phys
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm import init_mm
from memcg_inspect.linux.mm.init_mm import KernelTables
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:]),
]


def test_text_is_mapped_by_huge_pages(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel).program()
    frames = mem_map(image_of(prog))
    huge = 512 * frames.page_size
    start = -(-prog.symbol("_text").address // huge) * huge
    coverage = Coverage()
    tables = KernelTables(image_of(prog), coverage)
    found = [pfn for some in tables.frames(start, 2 * huge) for pfn in some]
    table = prog["init_mm"].address_of_()
    addresses = range(start, start + 2 * huge, frames.page_size)
    assert found == [int(follow_phys(table, at)) >> frames.page_shift for at in addresses]
    assert not coverage.unreadable


def test_tables_of_user_space_that_are_not_in_the_image(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With page table isolation, the kernel has a second top-level table."""

    def unread(self: KernelTables, geometry: object, pgd: int) -> None:
        raise FaultError("not in the image", pgd)

    image, coverage = image_of(lab.image(kernel).program()), Coverage()
    monkeypatch.setattr(init_mm, "has_user_half", lambda image: True)
    monkeypatch.setattr(KernelTables, "_walk_user", unread)
    assert KernelTables(image, coverage).pfns
    assert coverage.unreadable == 1
