# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``cached_stacks`` on images; cases by hand are in tests/checks/test_task_rows.py."""

from __future__ import annotations

import pytest
from drgn import Program
from drgn.helpers.linux.cpumask import for_each_possible_cpu
from drgn.helpers.linux.percpu import per_cpu
from support.guests import KERNELS, Lab


def plain_pages(prog: Program) -> int:
    """Return the number of pages of all cached stacks."""
    caches = [per_cpu(prog["cached_stacks"], cpu) for cpu in for_each_possible_cpu(prog)]
    return sum(int(area.nr_pages) for cache in caches for area in cache if area)


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_cached_stack_is_looked_at(lab: Lab, kernel: str) -> None:
    for workload in ("mixed", "dying", "files"):
        image = lab.image(kernel, "4", workload)
        rows = [row for row in image.report().rows if row.identity == "cached_stacks"]
        assert [row.nid for row in rows] == [0, 1, 2, 3]
        assert {row.status for row in rows} == {"exact"}
        cached = plain_pages(image.program(dwarf=True))
        assert sum((row.claimed or {})["cached"] for row in rows) == cached
