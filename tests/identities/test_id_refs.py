# SPDX-License-Identifier: LGPL-2.1-or-later
"""The identity ``id_refs``, by hand and on images of real kernels."""

from __future__ import annotations

import pytest
from drgn import Object
from support.guests import KERNELS, Lab
from support.made import DEAD, A, B, snapshot

from memcg_inspect.checks.identities.id_refs import id_ref_rows
from memcg_inspect.checks.judge import judge
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Coverage, CssRefs, StackRef
from memcg_inspect.report import RowStatus


def made(off: int = 0, **more: object) -> Snapshot:
    """Return a snapshot with 3 entries of ``/a/b`` in swap, and 5 of the removed ``/a/dead``."""
    css = {
        A: CssRefs(9, 5, 1, True, 1),
        B: CssRefs(9, 6, 4 + off, True, 1),
        DEAD: CssRefs(9, 7, 5, False, 0),
    }
    return snapshot(**{"css": css, "swap_ids": {6: 3, 7: 5, 99: 1}, **more})


def status(taken: Snapshot) -> RowStatus:
    [row] = [r for r in judge(taken).rows if r.identity == "id_refs" and r.memcg == B]
    return row.status


def test_swap_entries_and_the_memcg_itself() -> None:
    rows = {row.memcg: row for row in id_ref_rows(made())}
    assert {memcg: (row.found, row.claimed, row.status) for memcg, row in rows.items()} == {
        A: ({"memcg": 1, "swap": 0}, {"id.ref": 1}, "exact"),
        B: ({"memcg": 1, "swap": 3}, {"id.ref": 4}, "exact"),
        DEAD: ({"memcg": 0, "swap": 5}, {"id.ref": 5}, "exact"),
    }


def test_a_memcg_without_an_id_has_no_entries() -> None:
    css = {B: CssRefs(9, 0, 0, False, 0)}
    [row] = [row for row in id_ref_rows(made(css=css, swap_ids={0: 1 << 20})) if row.memcg == B]
    assert (row.found, row.status) == ({"memcg": 0, "swap": 0}, "exact")


@pytest.mark.parametrize(("off", "kind"), [(2, "unknown-references"), (-1, "missing-references")])
def test_other_references_than_were_found(off: int, kind: str) -> None:
    found = [pending.finding for pending in judge(made(off)).findings]
    [finding] = [finding for finding in found if finding.identity == "id_refs"]
    assert (finding.memcg, finding.item, finding.difference) == (B, "id.ref", off)
    assert finding.kind == kind


def test_entries_that_could_not_be_read() -> None:
    coverage = {"swap_ids": Coverage(1, 1)}
    assert status(made(2, coverage=coverage)) == "unverifiable"
    assert status(made(-1, coverage=coverage)) == "differs"


def test_a_folio_that_is_being_swapped_out() -> None:
    swapping = {B: [StackRef(7, "kswapd0", 1, 2, ("__mem_cgroup_try_charge_swap",))]}
    assert status(made(512, css_stacks=swapping)) == "in-flight"
    assert status(made(513, css_stacks=swapping)) == "differs"
    charging = {B: [StackRef(7, "sh", 1, 2, ("try_charge_memcg",))]}
    assert status(made(2, css_stacks=charging)) == "differs"


@pytest.mark.image
@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", KERNELS)
def test_as_many_entries_as_the_page_counter_of_swap(lab: Lab, kernel: str) -> None:
    """``memory.swap.current`` counts the same entries, with those of descendants."""
    image = lab.image(kernel, "4", "mixed")
    report = image.report()
    rows = {row.memcg: row for row in report.rows if row.identity == "id_refs"}
    assert len(rows) == len(report.memcgs) - 1
    assert {row.status for row in rows.values()} == {"exact"}
    parents = {memcg.parent for memcg in report.memcgs}
    swapped = 0
    for address, row in rows.items():
        assert address is not None
        if address not in parents:
            memcg = Object(image.program(), "struct mem_cgroup *", address)
            usage = int(memcg.swap.usage.counter)
            assert row.found["swap"] == usage
            swapped += usage
    assert swapped > 1000
