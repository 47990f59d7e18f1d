# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Sockets of SCTP and kTLS, which are modules of Debian's kernels.

The workload ``protocols`` has sockets of both, busy and idle, in a memcg of their own.
"""

from __future__ import annotations

import pytest
from labkit import kernels, kmodules
from support.findings import by_path, named
from support.guest_files import numbers
from support.guests import DEBIAN_KERNELS, GuestImage, Lab, Plant
from support.sockets import sockets_of

from memcg_inspect.report import Row

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", DEBIAN_KERNELS),
]

PAGE = 4096
#: Modules that the workload needs. Those that a kernel has built in are left out.
MODULES = ["sctp", "ctr", "ghash_generic", "gcm", "tls"]


def image_of_protocols(lab: Lab, kernel: str) -> GuestImage:
    modules = kmodules.in_order(kernels.kernel(kernel), MODULES)
    return lab.image(kernel, "2", "protocols", modules=tuple((f"+{m}", "") for m in modules))


def sock_rows(image: GuestImage) -> dict[tuple[str, str], Row]:
    """Return the rows about sockets by the last part of the memcg, and identity."""
    report = image.report()
    paths = {address: path for path, address in by_path(report).items()}
    return {
        (paths[row.memcg or 0].rpartition("/")[2], row.identity): row
        for row in report.rows
        if row.identity in ("sock", "sock_bytes")
    }


def test_nothing_is_reported(lab: Lab, kernel: str) -> None:
    report = image_of_protocols(lab, kernel).report()
    assert (report.verdict, report.findings) == ("incomplete", ())


def test_idle_sockets_are_exact(lab: Lab, kernel: str) -> None:
    image = image_of_protocols(lab, kernel)
    said, rows = numbers(image.guest / "2/cgroup", "memory.stat"), sock_rows(image)
    for name in ("sctp_idle", "ktls_idle"):
        assert rows[name, "sock"].status == rows[name, "sock_bytes"].status == "exact", name
        claimed = said[f"/protocols/{name}", "sock", None]
        assert sum(rows[name, "sock"].found.values()) == claimed // PAGE, name


def test_busy_sockets_are_unverifiable(lab: Lab, kernel: str) -> None:
    """Their counters do not tell what they have charged."""
    rows = sock_rows(image_of_protocols(lab, kernel))
    for name, reason in (("sctp", "sctp_chunk"), ("ktls", "sk_msg_alloc()")):
        row = rows[name, "sock"]
        assert row.status == "unverifiable", name
        assert row.difference != 0, name
        assert reason in (row.reason or ""), name


def test_a_fault_of_an_idle_socket(lab: Lab, plant: Plant, kernel: str) -> None:
    image = image_of_protocols(lab, kernel)
    victim = max(sockets_of(image)["sctp_idle"])
    forward = f"Object(prog, 'struct sock *', {victim.address:#x}).sk_forward_alloc"
    report = plant(image, (forward, "old + 100"))
    assert named(report, "sock_bytes") == {("/protocols/sctp_idle", None, "sk_forward_alloc", 1)}
    assert len(report.findings) == 1
