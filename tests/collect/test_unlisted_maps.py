# SPDX-License-Identifier: LGPL-2.1-or-later
"""BPF maps that are being freed hold references, though they have no ID and may be in no slab."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from drgn.helpers.linux.bpf import bpf_map_for_each
from support.guests import DEBIAN_KERNELS, Lab
from support.planting import Overlay, Subject, Write

from memcg_inspect.collect import unlisted_maps
from memcg_inspect.collect.released import queued_callback
from memcg_inspect.linux.kernel.bpf import map_objcgs

WHY = "its work item is queued or running"


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
@pytest.mark.parametrize("queue", ["work items", "callbacks"])
def test_a_map_that_is_queued_to_be_freed(
    lab: Lab, kernel: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bpf_map_free_in_work() queues a work item, maybe after a grace period."""
    subject = Subject(lab.image(kernel, "2", "bpfmaps").own_program())
    prog, image, before = subject.prog, subject.image, subject.snapshot
    held = ((found, Counter(map_objcgs(image, found))) for found in bpf_map_for_each(prog))
    bpf_map, objcgs = next((found, holds) for found, holds in held if holds)
    works, callbacks, why = [], {}, WHY
    if queue == "work items":
        # The same map may be found twice.
        works = [bpf_map.work.address_of_()] * 2
    else:
        function = prog.symbol("bpf_map_free_rcu_gp").address.to_bytes(8, "little")
        address = bpf_map.rcu.func.address_
        assert address is not None
        Overlay(prog).write((Write(address, function),))
        other = bpf_map.ops.value_()  # whatever is queued there is of another function
        callbacks, why = {other: 0, bpf_map.rcu.address_: 1}, queued_callback(1)
    monkeypatch.setattr(unlisted_maps, "works_of", lambda *_: iter(works))
    monkeypatch.setattr(unlisted_maps, "queued_callbacks", lambda _: callbacks)
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
    assert sorted(freed) == sorted((objcg, number, why) for objcg, number in objcgs.items())
