# SPDX-License-Identifier: LGPL-2.1-or-later
"""Speed and memory are what they were, as ratios."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.guests import ROOT


@pytest.mark.image
@pytest.mark.long
def test_no_figure_is_worse_than_the_baseline() -> None:
    bench = [sys.executable, ROOT / "scripts/bench", "--check"]
    done = subprocess.run(bench, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
