# SPDX-License-Identifier: LGPL-2.1-or-later
"""BPF maps that are being freed hold references, though they have no ID and may be in no slab."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from drgn.helpers.linux.bpf import bpf_map_for_each
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Subject

from memcg_inspect.collect import unlisted_maps
from memcg_inspect.linux.kernel.bpf import map_objcgs

WHY = "its work item is queued"


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_a_map_that_is_queued_to_be_freed(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(lab.image(kernel, "2", "bpfmaps").program())
    image, before = subject.image, subject.snapshot
    held = ((found, Counter(map_objcgs(image, found))) for found in bpf_map_for_each(subject.prog))
    bpf_map, objcgs = next((found, holds) for found, holds in held if holds)
    # The same map can be found twice: as a work item, and as a callback of RCU.
    queue = [(bpf_map, WHY), (bpf_map, "again")]
    monkeypatch.setattr(unlisted_maps, "_being_freed", lambda image: iter(queue))
    rows = subject.report.rows
    assert unlisted_maps.with_map_makers(image, before, rows) is before
    row = next(row for row in rows if row.identity == "references" and row.status == "exact")
    lost = replace(row, status="differs", claimed={"refcnt": sum(row.found.values()) + 1})
    after = unlisted_maps.with_map_makers(image, before, [lost])
    freed = [
        (objcg, transient.references, transient.freed_by)
        for objcg, some in after.transients.items()
        for transient in some
        if transient.address == bpf_map.value_()
    ]
    assert sorted(freed) == sorted((objcg, number, WHY) for objcg, number in objcgs.items())
