# SPDX-License-Identifier: LGPL-2.1-or-later
"""Evidence that changes while it is read does not remove a finding."""

from __future__ import annotations

import pytest
from support.guests import Lab, Plant

from memcg_inspect import collect
from memcg_inspect.image.image import Image

pytestmark = pytest.mark.image


def test_a_finding_outlives_its_evidence(
    lab: Lab, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, tries = lab.image("7.3", "4", "files"), []
    state = "root_mem_cgroup.nodeinfo[0].lruvec_stats.state[mem_cgroup_stats_index[NR_PAGETABLE]]"

    def moved(*args: object) -> None:
        tries.append(args)
        raise KeyError("what was there is gone")

    monkeypatch.setattr(Image, "is_moving", True)
    monkeypatch.setattr(collect, "find_evidence", moved)
    report = plant(image, (state, "old - 640"))
    assert tries
    assert report.verdict == "findings"
    assert ("pagetable", -640) in {(f.identity, f.difference) for f in report.findings}
