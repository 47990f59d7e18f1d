# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Tasks that sleep while they read the error queue of a socket.

The workload ``errqueue`` has such tasks for each kind of socket, in a memcg of its own.
"""

from __future__ import annotations

import pytest
from support.findings import by_path, named
from support.guests import DEBIAN_KERNELS, KERNELS, Lab, Plant
from support.sockets import sockets_of

from memcg_inspect.report import Report, Row

pytestmark = [
    pytest.mark.image,
    pytest.mark.newest_kernel,
    pytest.mark.parametrize("kernel", KERNELS),
]

#: Kernels that are built here have no IPv6.
READ = ("udp", "tcp"), ("udp", "udp6", "tcp")


def sock_rows(report: Report, name: str) -> dict[str, Row]:
    """Return the rows about the sockets of ``/errqueue/NAME``, by identity."""
    memcg = by_path(report)[f"/errqueue/{name}"]
    return {
        row.identity: row
        for row in report.rows
        if row.memcg == memcg and row.identity in ("sock", "sock_bytes")
    }


def test_a_task_reads_an_error_queue(lab: Lab, kernel: str) -> None:
    """The buffer that it reads is counted and in no queue."""
    report = lab.image(kernel, "2", "errqueue").report()
    assert (report.verdict, report.findings) == ("incomplete", ())
    for name in READ[kernel in DEBIAN_KERNELS]:
        row = sock_rows(report, name)["sock_bytes"]
        assert row.status == "unverifiable", name
        assert "is reading the error queue" in (row.reason or ""), name
    assert {row.status for row in sock_rows(report, "idle").values()} == {"exact"}


def test_an_error_queue_that_nobody_reads(lab: Lab, plant: Plant, kernel: str) -> None:
    image = lab.image(kernel, "2", "errqueue")
    victim = max(sock for sock in sockets_of(image)["idle"] if sock.charged)
    forward = f"Object(prog, 'struct sock *', {victim.address:#x}).sk_forward_alloc"
    report = plant(image, (forward, "old + 100"))
    assert named(report, "sock_bytes") == {("/errqueue/idle", None, "sk_forward_alloc", 1)}
    assert len(report.findings) == 1
