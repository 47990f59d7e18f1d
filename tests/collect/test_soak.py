# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The per-node kernel with debug options under stress: CPU hotplug, tasks that move between
memcgs while they charge, and memcgs that are made and removed.
"""

from __future__ import annotations

import pytest
from support.guests import Lab, complaints

KERNEL = "7.3-pernode-debug"
SECONDS = 200
LOCKDEP_OFF = "turning off the locking correctness validator"

pytestmark = [pytest.mark.image, pytest.mark.soak]


@pytest.mark.parametrize(
    ("nodes", "workload"), [("2", "stress"), ("2cpu+6mem", "stress"), ("4", "straddle")]
)
def test_under_lockdep(lab: Lab, nodes: str, workload: str) -> None:
    image = lab.image(KERNEL, nodes, workload, append=f"lab.seconds={SECONDS}")
    assert complaints(image.core) == []
    assert LOCKDEP_OFF not in (image.guest / "2" / "dmesg").read_text()
    prog = image.program(dwarf=True)
    # lockdep was at work, and at the end still was
    assert prog["debug_locks"].value_() == 1
    assert prog["nr_lock_classes"].value_() > 500
    report = image.report()
    assert report.image.accounting == "kmem-per-node"
    assert (report.findings, report.verdict) == ((), "exact")
    if workload == "straddle":
        assert report.follows is not None
        assert report.follows["zswap"] == "physical"
