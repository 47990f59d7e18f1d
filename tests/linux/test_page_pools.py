# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which words are the mark of a page of a page pool."""

from __future__ import annotations

import pytest
from drgn import offsetof
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.fs.proc_page import MarkReader

#: PP_SIGNATURE: POISON_POINTER_DELTA and 0x40.
SIGNATURE = 0xDEAD_0000_0000_0040


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_the_signature_and_what_may_be_in_it(lab: Lab, kernel: str) -> None:
    image = image_of(lab.image(kernel).program())
    markers = MarkReader(image)._pool_markers(image)
    at = offsetof(image.type("struct page"), "pp_magic")

    def is_mark(word: int) -> bool:
        data = word.to_bytes(8, "little")
        return all(data[m.offset - at] & m.mask == m.value for m in markers)

    assert len(markers) == 3
    assert all(map(is_mark, (SIGNATURE, SIGNATURE | 1, SIGNATURE | 0x1234 << 16)))
    others = (0, 0x40, SIGNATURE ^ 0x04, SIGNATURE ^ 1 << 48, SIGNATURE ^ 1 << 63)
    assert not any(map(is_mark, others))
