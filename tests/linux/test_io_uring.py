# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rings of io_uring, and pages of sockets in pipes, are not large kmallocs, whoever holds them.

The workload ``uring`` makes a ring of each kind, in a memcg of its own.
"""

from __future__ import annotations

import pytest
from support.findings import by_path
from support.guest_files import numbers
from support.guests import KERNELS, GuestImage, Lab, series

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", KERNELS),
]

PAGE = 4096
#: Pages of a ring of 2,048 entries: the entries, 64 bytes each, and the two queues.
RING = 32 + 32
#: Pages of two rings of 4,096 provided buffers.
BUFFERS = 2 * 16
RINGS = ("open", "mapped", "registered", "sqpoll", "buffers", "exiting")


def large_kmallocs(image: GuestImage) -> dict[str, int]:
    """Return the bytes that the audit counts as large kmallocs, by the last part of the memcg."""
    report = image.report()
    paths = {address: path for path, address in by_path(report).items()}
    found: dict[str, int] = {}
    for row in report.rows:
        if row.identity == "slab" and "large_kmalloc" in row.found:
            name = paths[row.memcg or 0].rpartition("/")[2]
            found[name] = found.get(name, 0) + row.found["large_kmalloc"]
    return found


def test_exact(lab: Lab, kernel: str) -> None:
    report = lab.image(kernel, "2", "uring").report()
    assert (report.verdict, report.findings) == ("exact", ())


def test_rings_are_no_slab_memory(lab: Lab, kernel: str) -> None:
    """The guest counts their pages as kernel memory, and not as slab memory."""
    image = lab.image(kernel, "2", "uring")
    said, counted = numbers(image.guest / "2/cgroup", "memory.stat"), large_kmallocs(image)
    for name in RINGS:
        pages = RING
        if name == "buffers" and series(kernel) != "6.1":  # IOU_PBUF_RING_MMAP came with 6.4
            pages += BUFFERS
        slab = said[f"/uring/{name}", "slab", None]
        assert said[f"/uring/{name}", "kernel", None] >= slab + pages * PAGE, name
        assert counted.get(name, 0) <= slab, name


def test_pages_of_sockets_in_pipes(lab: Lab, kernel: str) -> None:
    """The socket that the pages in the pipe came from is closed."""
    image = lab.image(kernel, "2", "uring")
    said = numbers(image.guest / "2/cgroup", "memory.stat")
    assert said["/uring/pipe", "kernel", None] >= said["/uring/pipe", "slab", None] + 8 * PAGE
    assert large_kmallocs(image).get("pipe", 0) <= said["/uring/pipe", "slab", None]
