# SPDX-License-Identifier: LGPL-2.1-or-later
"""
No finding on healthy guests, whatever their kernel, configuration, topology and workload.

By default some on the newest kernel; ``scripts/test --all --part breadth`` tries all, as
scripts/breadth does, and keeps the results for it.
"""

from __future__ import annotations

import pytest
from support import breadth
from support.breadth import Configuration, Result, document, ignored, pairs
from support.guests import DEBIAN_KERNELS, Lab

#: Of configurations; by default.
SAMPLE = ("facilities",)


def check(result: Result, configuration: Configuration) -> None:
    assert not result.accused
    # A kernel that does not know a parameter is configured like another of these guests.
    known = set(configuration.append.split()) - set(ignored(result, configuration))
    assert known or not configuration.append or "6.1" in result.kernel, result
    # It was not empty.
    assert result.exact > 100
    if configuration.freeze == "settled" and not result.findings:
        assert result.exact == result.rows - result.unverifiable


@pytest.mark.image
@pytest.mark.parametrize("workload", SAMPLE)
def test_exact_on_the_newest_kernel(lab: Lab, workload: str) -> None:
    """With the workloads that use most facilities of the kernel."""
    options = breadth.options_of(DEBIAN_KERNELS[-1], Configuration("", workload=workload))
    image = lab.image(
        options.kernel, options.nodes, workload, modules=options.modules, memory="768M"
    )
    report = image.report()
    assert [row for row in report.rows if row.status != "exact"] == []
    assert report.verdict == "exact"
    paths = {memcg.path for memcg in report.memcgs if memcg.state == "online"}
    mine = {path for path in paths if path.startswith(f"/{workload}/")}
    used = {r.memcg for r in report.rows if r.identity == "usage" and sum(r.found.values())}
    assert len(mine) > 5
    empty = {m.path for m in report.memcgs if m.path in mine and m.address not in used}
    assert empty <= {"/pressure/group"}  # its process was killed


@pytest.mark.image
@pytest.mark.long
@pytest.mark.parametrize(("kernel", "configuration"), pairs(), ids=lambda p: getattr(p, "name", p))
def test_no_finding_on_healthy_guests(kernel: str, configuration: Configuration) -> None:
    check(breadth.run(kernel, configuration), configuration)


def test_document() -> None:
    known, other = ["pagetable", "NR_PAGETABLE", -1], ["slab", "NR_SLAB_RECLAIMABLE_B", -8]
    made = [
        Result("7.2", "one node", "mixed", "exact", 1200, 1200, 0, [], 0, "", 20.0),
        Result("7.3", "one node", "mixed", "incomplete", 1300, 1299, 1, [], 0, "", 20.0),
        Result("7.3", "KFENCE", "mixed", "findings", 900, 899, 0, [["slab", "X", 8]], 0, "", 20.0),
        Result("6.18", "mixed", "mixed", "findings", 100, 98, 0, [known, known], 2, "", 0.0),
        Result("6.18", "pages", "pages", "findings", 100, 99, 0, [known, other], 1, "", 0.0),
        Result("6.16", "pages", "pages", "exact", 100, 100, 0, [], 0, "", 0.0),
    ]
    text = document(made, "abc", "2026-01-02").splitlines()
    assert text[0] == "commit abc, 2026-01-02: 6 guests, 3,700 rows, 1 minutes"
    assert text[1] == (
        "with a finding: 2; with rows that could not be verified: 1; "
        "with a fault of the kernel itself: 1"
    )
    assert text[3].split() == ["configuration", "workload", "7.2", "7.3"]
    assert text[4].split("  ")[-1].strip() == "1,299, 1 not"
    assert text[5].split() == ["KFENCE", "mixed", "-", "1", "finding"]
    assert text[7].split() == ["kernel", "mixed", "pages"]
    assert text[8].split() == ["6.18", "98,", "2", "found", "2", "findings"]
    assert text[9].split() == ["6.16", "-", "100"]
