# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Guests stopped, or not, in the middle of network traffic: no socket is accused.

Workload ``traffic`` fills and drains receive queues, write queues and error queues on all CPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from support.guests import DEBIAN_KERNELS
from support.live_guest import from_outside, kept

pytestmark = [pytest.mark.image, pytest.mark.long]

TRAFFIC = ("--nodes", "2", "--workload", "traffic", "--freeze", "none")
#: recvmsg() takes an skb off the error queue before it takes off its bytes. What a CPU of a guest
#: that was stopped from outside is doing is not known: its registers are not.
KNOWN = re.compile(
    "is reading the error queue"
    "|^a charge may be half done, but no stack shows this amount: .* in an unknown place"
)
MEMCGS = {f"/traffic/{name}" for name in ("copied", "zerocopy", "stamps", "datagrams")}


@pytest.mark.parametrize("kernel", [DEBIAN_KERNELS[0], DEBIAN_KERNELS[-1]])
def test_no_socket_is_accused(tmp_path: Path, kernel: str) -> None:
    exact: Counter[str] = Counter()
    with kept(tmp_path, kernel, *TRAFFIC) as qmp:
        for options in [("--pause",)] * 20 + [()] * 4:
            report = from_outside(qmp, *options)["report"]
            assert report["findings"] == []
            names = {memcg["address"]: memcg["path"] for memcg in report["memcgs"]}
            rows = [row for row in report["rows"] if row["identity"] == "sock_bytes"]
            unsure = [row for row in rows if row["status"] == "unverifiable"]
            reasons = {row["reason"] for row in unsure}
            assert all(map(KNOWN.search, reasons)), reasons
            statuses = {row["status"] for row in rows}
            assert statuses <= {"exact", "in-flight", "moving", "unverifiable"}
            if options:
                exact.update(names[row["memcg"]] for row in rows if row["status"] == "exact")
    # What stopped in the middle of something is the exception.
    assert exact.keys() == MEMCGS
    assert min(exact.values()) >= 10
