# SPDX-License-Identifier: LGPL-2.1-or-later
"""Views of kernels that run."""

from __future__ import annotations

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
    """Pages are freed and allocated while they are read: nothing is called unreadable."""
    read = [sys.executable, "-m", "memcg_inspect", "--qemu", tmp_path / "qmp", "pages"]
    with kept(tmp_path, NEWEST, *CHURN):
        for _ in range(3):
            done = subprocess.run(read, capture_output=True, text=True, timeout=120, check=False)
            assert (done.returncode, done.stderr) == (0, ""), done.stdout
