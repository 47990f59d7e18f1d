# SPDX-License-Identifier: LGPL-2.1-or-later
"""References to obj_cgroups that no list leads to: those of BPF maps without an ID."""

from __future__ import annotations

import pytest
from support.guests import Lab
from support.planters import planters_of
from support.planting import Subject

pytestmark = pytest.mark.image

#: References: more than all maps of the workload hold.
MANY = 100_000


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", ["6.1", "6.12", "7.2", "7.3"])
def test_maps_that_are_created_or_freed(lab: Lab, kernel: str) -> None:
    """No leak is reported, and a reference that no map holds is."""
    image = lab.image(kernel, "4", "mapchurn", freeze="busy", seed=1)
    subject = Subject(image.program())
    assert subject.report.findings == ()
    subject.below = "/mapchurn/"
    fault = planters_of("references")[0].plant(subject, MANY)
    [finding] = [f for f in subject.audit(fault).findings if f.identity == "references"]
    # References that a CPU takes or drops when it is stopped are in the row, too.
    [own] = [
        row.difference or 0
        for row in subject.report.rows
        if (row.identity, row.objcg) == ("references", finding.objcg)
    ]
    assert finding.difference == own + MANY
