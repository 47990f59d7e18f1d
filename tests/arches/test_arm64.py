# SPDX-License-Identifier: LGPL-2.1-or-later
"""
One image of Debian's arm64 kernel, held against what the guest said.

``scripts/test --all --part arm64-rest`` runs the tests of all kernels on those of arm64.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from support.exact import check_exact, not_kept
from support.guest_files import still_on_lists
from support.guests import OF_OTHERS, GuestImage, Lab

from memcg_inspect.collect.charge_snapshot import take_snapshot
from memcg_inspect.image.image import image_of
from memcg_inspect.report import Report
from memcg_inspect.views.pages import pages
from memcg_inspect.views.rss import rss

pytestmark = pytest.mark.image


@pytest.mark.parametrize("kernel", OF_OTHERS)
def test_every_identity_is_exact(lab: Lab, kernel: str) -> None:
    report: Report = lab.image(kernel, "4", "mixed").report()
    check_exact(report, not_kept(kernel))
    assert report.image.nodes == (0, 1, 2, 3)


@pytest.mark.parametrize("kernel", OF_OTHERS)
def test_pages_add_up(lab: Lab, kernel: str) -> None:
    """All page frames have an owner, as far as the guest's /proc/zoneinfo has any."""
    image: GuestImage = lab.image(kernel, "4", "mixed")
    answer = pages(image_of(image.program()))
    by_kind, zones = answer.tables[:2]
    found: Counter[int] = Counter()
    unknown = 0
    for row in map(by_kind.values, by_kind.rows):
        found[row["node"]] += row["pages"]
        unknown += row["pages"] if row["kind"] == "unknown" else 0
    said: dict[int, int] = defaultdict(int)
    node = None
    for line in (image.guest / "2/proc/zoneinfo").read_text().splitlines():
        if line.startswith("Node "):
            node = int(line.split()[1].rstrip(","))
        elif line.split()[:1] == ["present"] and node is not None:
            said[node] += int(line.split()[1])
    assert found == said
    assert unknown < sum(said.values()) / 1000
    assert zones.rows
    assert not any(coverage.unreadable for coverage in answer.coverage.values())


@pytest.mark.parametrize("kernel", OF_OTHERS)
def test_user_pages_are_what_the_guest_says(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    found = take_snapshot(image_of(image.program()))
    assert found.is_whole
    on_lists: Counter[tuple[str, int]] = Counter()
    for charge in found.charges:
        if charge.kind == "lru" and charge.memcg is not None and charge.node is not None:
            path = found.memcgs[charge.memcg].path
            while path not in ("", "/"):
                on_lists[path, charge.node] += charge.bytes
                path = path.rpartition("/")[0]
    whole = still_on_lists(image)
    assert {key: on_lists[key] for key in whole} == whole
    assert sum(value > 0 for value in whole.values()) >= 10


@pytest.mark.parametrize("kernel", OF_OTHERS)
def test_page_tables_have_what_rss_counts(lab: Lab, kernel: str) -> None:
    [table] = rss(image_of(lab.image(kernel, "4", "mixed").program()), check=True).tables
    statuses = Counter(table.values(row)["status"] for row in table.rows)
    assert statuses == {"exact": len(table.rows)}
    assert len(table.rows) > 50
