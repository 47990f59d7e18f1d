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
    """Free pages come and go while they are read: none of their lists is called unreadable."""
    with kept(tmp_path, NEWEST, *CHURN) as qmp:
        for _ in range(3):
            found = from_outside(qmp, command="pages")
            report = found["report"]
            unreadable = {name: c["unreadable"] for name, c in report["coverage"].items()}
            assert (unreadable["free_lists"], found["said"]) == (0, "")
            # Each sample may miss something else.
            assert found["status"] == (3 if any(unreadable.values()) else 0)
            [rows] = [table["rows"] for table in report["tables"] if table["name"] == "pages"]
            assert sum(row["pages"] for row in rows if row["kind"] == "free_pcp") > 0
