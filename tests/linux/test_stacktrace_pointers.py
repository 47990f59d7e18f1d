# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which integers on a stack may be the size of a percpu allocation."""

from __future__ import annotations

import pytest
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.stacktrace_pointers import PointerReader

#: Of include/linux/percpu.h: PCPU_MIN_ALLOC_SIZE and PCPU_MIN_UNIT_SIZE.
LEAST, MOST = 4, 32 << 10


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS)
def test_sizes_of_percpu_allocations(lab: Lab, kernel: str) -> None:
    prog = lab.image(kernel, "4").program()
    reader = PointerReader(image_of(prog), (), (), ())
    words = [0, 1, LEAST, LEAST, 6, 64, MOST, MOST + LEAST, 1 << 63]
    found = list(reader.percpu(words))
    assert [held.address for held in found] == [LEAST, 64, MOST]
    # Four copies, and a pointer to the obj_cgroup for each four bytes.
    assert [held.bytes for held in found] == [6 * size for size in (LEAST, 64, MOST)]
    assert {held.kind for held in found} == {"percpu"}
