# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests that are stopped while they split a huge page."""

from __future__ import annotations

import pytest
from support.findings import named
from support.guests import Lab
from support.planters.css_refs import of_memcg
from support.planting import Fault, Subject

PAGES = 512


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", ["7.3"])
def test_references_of_the_parts_of_a_folio(lab: Lab, kernel: str) -> None:
    # After so many instructions the references are taken, and the folio is whole.
    freeze, seed = "in:folio_split_memcg_refs", 6
    # Another CPU could be splitting a huge page, too, or be calling callbacks that free anything.
    image = lab.image(kernel, "1", "thpsplit", freeze=freeze, seed=seed, cpus=1)
    subject = Subject(image.program())
    assert named(subject.report, "references") == set()
    [row] = [r for r in subject.report.rows if "for the parts of folio" in (r.reason or "")]
    assert (row.identity, row.status, row.difference) == ("references", "in-flight", PAGES - 1)
    # One more than the folio has parts.
    path = subject.path(row.objcg or 0)
    objcg = subject.object("struct obj_cgroup *", row.objcg or 0)
    fault = Fault((subject.add(objcg.refcnt.data.count, 1),), (path,), set())
    found = named(subject.audit(fault), "references")
    assert found == {(path, row.nid, "refcnt", PAGES)}
    # Another memcg is not excused.
    other = next(p for p in subject.paths if p.startswith("/thpsplit/") and p != path)
    fault = of_memcg(subject, subject.paths[other], other, 100)
    report = subject.audit(fault)
    [row] = [r for r in report.rows if (r.identity, r.memcg) == ("css_refs", subject.paths[other])]
    assert row.status == "differs", row
