# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Dumps that lack pages.

At level 23 makedumpfile leaves out no page that is needed. At level 31 it leaves out pages of newer
kernels that are: then there is no finding, and rows that do not need those pages are verified.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from labkit import poke
from support import missing_pages
from support.guests import BUILT_KERNELS, KERNELS, GuestImage, Lab
from support.missing_pages import ask_without, opened, slab_pages, without_bytes

from memcg_inspect.checks.identities.slab import ITEMS
from memcg_inspect.collect import audit, collect
from memcg_inspect.image.image import image_of
from memcg_inspect.image.missing import why_faults
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.report import Report, Row

pytestmark = [pytest.mark.image, pytest.mark.each_kernel]

#: What makedumpfile still takes apart rightly at level 31. Of 6.12 it leaves out tail pages, but
#: none that matter of the lab's small one, which leaves nothing to test there.
WHOLE = ("6.1",)
LACKING = tuple(kernel for kernel in KERNELS if kernel not in (*WHOLE, "6.12-lab"))

#: More pages of slabs than no audit can do without, among few that are missing.
NEEDED = 4

Filter = Callable[[GuestImage, int], Report]


@pytest.fixture
def filtered(tmp_path: Path) -> Iterator[Filter]:
    """Filters a copy of an ELF image with makedumpfile, and audits the result."""
    made: list[Path] = []

    def audit_filtered(image: GuestImage, level: int) -> Report:
        out = tmp_path / f"{len(made)}.kdump"
        made.append(out)
        missing_pages.filtered(image, out, level)
        return audit(image_of(opened(out)))

    yield audit_filtered
    for path in made:
        path.unlink(missing_ok=True)


def told(report: Report) -> dict[str, Any]:
    """Return a report without its timings."""
    return {name: value for name, value in vars(report).items() if name != "timings"}


def key(row: Row) -> tuple[object, ...]:
    """Return the key of a row. An obj_cgroup is enough: its memcg and its node may be missing."""
    if row.objcg is not None:
        return row.identity, row.objcg, row.item
    return row.identity, row.memcg, row.nid, row.item


def check_nothing_made_up(report: Report, whole: Report) -> None:
    """Check that there is no finding, and that exact rows are exact in the whole image, too."""
    assert report.verdict == "incomplete"
    assert report.findings == ()
    truth = {key(row): row for row in whole.rows}
    for row in report.rows:
        assert row.status in ("exact", "unverifiable")
        if row.status == "exact":
            assert (row.found, row.claimed) == (truth[key(row)].found, truth[key(row)].claimed)
        else:
            assert row.reason
    assert any(coverage.unreadable for coverage in report.coverage.values())
    paths = [memcg.path for memcg in report.memcgs]
    online = [m.path for m in report.memcgs if m.state == "online"]
    assert len(set(online)) == len(online)
    assert paths[0] == "/"


@pytest.mark.parametrize("kernel", KERNELS)
def test_level_23_says_the_same(lab: Lab, filtered: Filter, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    assert image.report().verdict == "exact"
    assert told(filtered(image, 23)) == told(image.report())


@pytest.mark.parametrize("kernel", WHOLE)
def test_level_31_says_the_same(lab: Lab, filtered: Filter, kernel: str) -> None:
    image = lab.image(kernel, "4", "mixed")
    assert told(filtered(image, 31)) == told(image.report())


def _readable(report: Report) -> Row | None:
    """Return a row of slab memory with a counter that could be read, and charges."""
    parents = {memcg.parent for memcg in report.memcgs}
    rows = (
        row
        for row in report.rows
        if row.identity == "slab"
        and row.memcg not in parents
        and row.claimed is not None
        and row.found.get("slab", 0) >= 1000
    )
    return next(rows, None)


def _with_memcgs(lab: Lab, filtered: Filter, kernel: str) -> tuple[GuestImage, Report, Row]:
    """
    Return an image of which level 31 leaves memcgs, its report, and a readable row of one.

    It depends on where memcgs are which of them makedumpfile leaves out.
    """
    for workload in ("mixed", "files", "dying"):
        image = lab.image(kernel, "4", workload)
        report = filtered(image, 31)
        check_nothing_made_up(report, image.report())
        row = _readable(report)
        if row is not None:
            return image, report, row
    raise AssertionError("makedumpfile left out the memcgs of all images")


@pytest.mark.parametrize("kernel", LACKING)
def test_level_31_is_incomplete(lab: Lab, filtered: Filter, kernel: str) -> None:
    _, report, _ = _with_memcgs(lab, filtered, kernel)
    assert sum(row.status == "exact" for row in report.rows) > 50
    (note,) = report.notes
    assert "makedumpfile" in note
    assert "level 23" in note


@pytest.mark.parametrize("kernel", LACKING)
def test_more_than_claimed_is_a_finding(
    lab: Lab, filtered: Filter, kernel: str, tmp_path: Path
) -> None:
    image, _, row = _with_memcgs(lab, filtered, kernel)
    slot = StatReader(image_of(image.program()), ITEMS.values()).slots[row.item]
    stats = f"Object(prog, 'struct mem_cgroup *', {row.memcg}).nodeinfo[{row.nid}].lruvec_stats"
    broken = tmp_path / "broken"
    amount = 8 + (row.difference or 0)
    change = (f"{stats}.state[{slot}]", f"old - {amount}")
    poke.poke(image.core, broken, image.vmlinux, [change])
    report = filtered(GuestImage(broken, image.vmlinux), 31)
    broken.unlink()
    assert report.verdict == "findings"
    finding = next(f for f in report.findings if f.memcg == row.memcg)
    assert (finding.identity, finding.item, finding.nid) == ("slab", row.item, row.nid)
    assert finding.difference == -8


@pytest.mark.parametrize("share", [0.0005, 0.02])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_pages_of_slabs_may_be_missing(lab: Lab, kernel: str, share: float) -> None:
    image = lab.image(kernel, "4", "mixed")
    pages = slab_pages(image.program())
    for seed in range(3):
        chance = random.Random(seed)
        gone = {pfn for pfn in pages if chance.random() < share}
        report, left = ask_without(image, gone, audit)
        # Nothing can be read without some slabs, e.g. that of the root memcg: few in every image.
        assert len(gone - left) <= max(NEEDED, 0.2 * len(gone))
        if report.verdict != "exact":
            check_nothing_made_up(report, image.report())
        # Of few pages that are missing, the audit may need none.
        assert report.verdict == "incomplete" or share < 0.001


@pytest.mark.parametrize("kernel", KERNELS)
def test_sockets_of_a_removed_memcg_that_is_missing(lab: Lab, kernel: str) -> None:
    """It is not known then which memcg has them."""
    image = lab.image(kernel, "4", "mixed")
    prog = image.program()
    snapshot = collect(image_of(prog))
    owners = {
        memcg.address: memcg.payer
        for payer in snapshot.sockets
        if (memcg := snapshot.memcgs.get(payer)) is not None and memcg.payer != memcg.address
    }
    assert owners
    gone = next(iter(owners))
    # Its bytes alone: the page that holds them may hold the memcg that is asked for, too.
    without_it = without_bytes(image, gone, prog.type("struct mem_cgroup").size)
    report = audit(image_of(without_it))
    check_nothing_made_up(report, image.report())
    rows = {row.memcg: row for row in report.rows if row.identity == "sock_bytes"}
    row = rows[owners[gone]]
    assert row.status == "unverifiable"
    assert "whose sockets it has" in (row.reason or "")


@pytest.mark.long
@pytest.mark.parametrize("format", ["kdump", "elf"])
@pytest.mark.parametrize("kernel", LACKING)
def test_crash_dump_at_level_31(lab: Lab, kernel: str, format: str) -> None:
    """Pages that an ELF dump leaves out are missing, not zero."""
    report = lab.image(kernel, "4", "mixed", freeze="panic", format=format, level=31).report()
    assert report.verdict == "incomplete"
    assert not report.findings
    assert "level 23" in " ".join(report.notes)


@pytest.mark.parametrize("kernel", [kernel for kernel in BUILT_KERNELS if kernel == "7.3-lab"])
def test_guard_pages_are_nothing_missing(lab: Lab, kernel: str) -> None:
    """kfence unmaps pages beside its objects: what is read beyond an object may fault."""
    report = lab.image(kernel, "4", "churn", freeze="busy", seed=1).report()
    assert not any(coverage.unreadable for coverage in report.coverage.values())


def test_an_interrupted_walk_lacks_nothing() -> None:
    assert why_faults([STOPPED]) == ()
    assert len(why_faults([STOPPED, "short read from memory file"])) == 1
