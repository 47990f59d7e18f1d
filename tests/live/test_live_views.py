# SPDX-License-Identifier: LGPL-2.1-or-later
"""Views of kernels that run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.guests import DEBIAN_KERNELS
from support.live_guest import from_outside, kept

pytestmark = pytest.mark.image

NEWEST = DEBIAN_KERNELS[-1]
CHURN = ("--nodes", "4", "--workload", "churn", "--freeze", "none")


def test_page_frames_under_churn(tmp_path: Path) -> None:
    """Free pages come and go while they are read: their lists are not called unreadable."""
    with kept(tmp_path, NEWEST, *CHURN) as qmp:
        for _ in range(3):
            # A CPU may take pages from a list each time that it is read, but hardly in two runs.
            if missed := lists_missed(qmp):
                assert len(missed) == 1
                assert not missed & lists_missed(qmp)


def lists_missed(qmp: Path) -> set[str]:
    """Return the lists of free pages that one run calls unreadable."""
    found = from_outside(qmp, command="pages")
    report = found["report"]
    unreadable = {name: c["unreadable"] for name, c in report["coverage"].items()}
    assert found["said"] == ""
    # Each sample may miss something else.
    assert found["status"] == (3 if any(unreadable.values()) else 0)
    [rows] = [table["rows"] for table in report["tables"] if table["name"] == "pages"]
    assert sum(row["pages"] for row in rows if row["kind"] == "free_pcp") > 0
    reasons = [example["reason"] for example in report["coverage"]["free_lists"]["examples"]]
    assert len(reasons) == unreadable["free_lists"]
    # Where a list led to is not the same each time.
    return {reason.partition(" led to ")[0] for reason in reasons}
