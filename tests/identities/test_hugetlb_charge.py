# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests that are stopped while alloc_hugetlb_folio() has charged, and has no huge page yet."""

from __future__ import annotations

import pytest
from support.guests import Lab
from support.planting import Fault, Subject

pytestmark = pytest.mark.image

#: Pages of a huge page of x86-64.
HUGE = 512


@pytest.mark.long
def test_a_huge_page_that_is_charged_but_not_allocated(lab: Lab) -> None:
    freeze = "in:alloc_hugetlb_folio/hugetlb_cgroup_charge_cgroup"
    subject = Subject(lab.image("6.12", "2", "hugepages", freeze=freeze).program())
    assert subject.report.verdict == "exact"
    [row] = [r for r in subject.report.rows if r.identity == "usage" and r.status != "exact"]
    shown = (row.status, row.difference, subject.path(row.memcg or 0))
    assert shown == ("in-flight", HUGE, "/hugetlb")
    assert "in alloc_hugetlb_folio" in (row.reason or "")
    # Another amount is none of a huge page.
    counter = subject.percpu_counter("/hugetlb", "MEMCG_KMEM")
    report = subject.audit(Fault((subject.add(counter, HUGE),), ("/hugetlb",), set()))
    assert report.verdict == "findings"
