# SPDX-License-Identifier: LGPL-2.1-or-later
"""Views of kernels that run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.guests import DEBIAN_KERNELS
from support.live_guest import kept

pytestmark = pytest.mark.image

NEWEST = DEBIAN_KERNELS[-1]
CHURN = ("--nodes", "4", "--workload", "churn", "--freeze", "none")


def test_page_frames_under_churn(tmp_path: Path) -> None:
    """Free pages come and go while they are read: none of their lists is called unreadable."""
    command = [sys.executable, "-m", "memcg_inspect", "--qemu", tmp_path / "qmp", "pages", "--json"]
    with kept(tmp_path, NEWEST, *CHURN):
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            found = json.loads(done.stdout)
            unreadable = {name: c["unreadable"] for name, c in found["coverage"].items()}
            assert (unreadable["free_lists"], done.stderr) == (0, "")
            # What is freed in each sample is not readable in any.
            assert done.returncode == (3 if any(unreadable.values()) else 0)
            [rows] = [table["rows"] for table in found["tables"] if table["name"] == "pages"]
            assert sum(row["pages"] for row in rows if row["kind"] == "free_pcp") > 0
