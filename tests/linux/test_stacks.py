# SPDX-License-Identifier: LGPL-2.1-or-later
"""Stacks without debug info are those that drgn unwinds with it, by other tables."""

from __future__ import annotations

import pytest
from support.guests import KERNELS, Lab

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.kernel.stacktrace import read_running

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]


@pytest.mark.parametrize("kernel", KERNELS)
def test_functions_of_stacks_are_no_old_names(lab: Lab, kernel: str) -> None:
    """Functions that have returned leave addresses on the stack."""
    image = lab.image(kernel, "4", "churn", freeze="busy", seed=1)
    known = {(t.cpu, t.pid): t for t in read_running(image_of(image.program(dwarf=True)))}
    found = {(t.cpu, t.pid): t for t in read_running(image_of(image.program()))}
    assert known.keys() == found.keys()
    right = 0
    for key, task in found.items():
        # Several names can be of one address; drgn and kallsyms choose different ones.
        more = [
            name
            for name in set(task.functions) - set(known[key].functions)
            if not name.startswith(("entry_", "common_startup", "secondary_startup"))
        ]
        right += not more
    # A CPU that changes from one task to another cannot be unwound.
    assert right >= 0.8 * len(found), found
    assert sum(len(task.functions) > 3 for task in found.values()) > 2
