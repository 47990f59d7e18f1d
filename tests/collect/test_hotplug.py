# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memory that was added to a running kernel: only online sections are read, and counters of a node
that was without memory for a time are doubtful.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drgn import Program
from drgn.helpers.linux.mm import pfn_to_page
from labkit import hotplug, kernels
from labkit.machine import Options
from support.guests import DEBIAN_KERNELS, ROOT, GuestImage, Plant

from memcg_inspect.collect import audit
from memcg_inspect.image.image import image_of
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.linux.mm.mmzone import page_ranges, steady_nodes

pytestmark = [
    pytest.mark.image,
    pytest.mark.parametrize("kernel", (DEBIAN_KERNELS[0], DEBIAN_KERNELS[-1])),
    pytest.mark.newest_kernel,
]

#: Page frames in a block of memory, which is one section.
BLOCK = (128 << 20) // 4096
#: Where QEMU puts memory that is added.
ADDED = (4 << 30) // 4096


def hotplugged(kernel: str) -> GuestImage:
    """Return an image with blocks that were never online, are online, or are offline again."""
    options = Options(
        kernel,
        memory="512M",
        append="memhp_default_state=offline init_on_alloc=0",
        run=str(ROOT / "fixtures/scenes/blocks.sh"),
    )
    return GuestImage(hotplug.image(options, "384M"))


def zone_normal(guest: Path) -> tuple[int, int]:
    """Return first page frame and pages of ZONE_NORMAL, which is all in the added memory."""
    text = (guest / "2/proc/zoneinfo").read_text()
    zone = re.search(r"zone +Normal\n.*?present +(\d+).*?start_pfn: +(\d+)", text, re.DOTALL)
    assert zone is not None
    return int(zone[2]), int(zone[1])


def charged(prog: Program, start: int) -> int:
    """Return the charged pages among every 16th page of a block."""
    pages = pfn_to_page(prog, start)
    return sum(bool(pages[n].memcg_data.value_()) for n in range(0, BLOCK, 16))


@pytest.mark.long
def test_only_online_sections_count(kernel: str) -> None:
    image = hotplugged(kernel)
    start, present = zone_normal(image.guest)
    assert (start, present) == (ADDED + BLOCK, BLOCK)
    added = [r for r in page_ranges(image_of(image.program())) if r.end > ADDED]
    assert added == [(start, start + present)]


def test_audit_of_a_kernel_with_offline_memory(kernel: str) -> None:
    image = hotplugged(kernel)
    prog = image.program()
    # The memory map of the first block was never initialised: anything can be in it. Here, every
    # page looks charged.
    start, size = pfn_to_page(prog, ADDED).value_(), BLOCK * prog.type("struct page").size
    prog = open_program(ImageSource(core=str(image.core), debuginfo="btf"))
    prog.add_memory_segment(start, size, lambda address, count, *_: b"\xaa" * count, False)
    assert charged(prog, ADDED) == BLOCK // 16
    report = audit(image_of(prog))
    assert (report.verdict, report.findings) == ("exact", ())
    # without the charges in the memory that is online, it would not be
    assert charged(prog, ADDED + BLOCK) > 5


def test_a_node_that_was_without_memory_for_a_time(kernel: str, plant: Plant) -> None:
    """
    What memcgs counted on the node is lost with them. That is legal, and nothing is wrong.

    The other nodes had memory all the time: their counters are exact, and a fault is found.
    """
    options = Options(
        kernel,
        "2",
        memory="512M",
        append="memhp_default_state=offline",
        run=str(ROOT / "fixtures/scenes/node.sh"),
    )
    image = GuestImage(hotplug.image(options, "256M@new"))
    assert steady_nodes(image_of(image.program())) == {0, 1}
    report = image.report()
    assert report.findings == ()
    doubtful = [row for row in report.rows if row.status != "exact"]
    # Which counters lose changes depends on what memcgs had not flushed when the node went. A memcg
    # that is still there may have flushed them since.
    assert report.verdict == ("incomplete" if doubtful else "exact")
    for row in doubtful:
        assert row.nid in (None, 2)
        assert row.reason is not None
        assert row.reason.startswith("node 2 may have had no memory for a time")
    shmem = "prog['node_data'][{}].vm_stat[prog['NR_SHMEM']].counter"
    kernels.debug_info(kernel)  # plant() needs it, and these images do not note their kernel
    planted = plant(image, (shmem.format(0), "old + 5"), (shmem.format(2), "old + 7"))
    found = {(f.nid, f.item, f.difference) for f in planted.findings if f.identity == "node_levels"}
    assert found == {(0, "NR_SHMEM", 5)}
