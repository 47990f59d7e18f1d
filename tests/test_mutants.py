# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Most small changes to the source are noticed by a test.

This is a report: scripts/mutate prints the changes that no test notices, and
``scripts/test --all --part mutants`` runs it. What it measures is in docs/reliability.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
@pytest.mark.image
@pytest.mark.parametrize("name", ["pure", "readers"])
def test_most_mutants_are_noticed(name: str) -> None:
    command = [sys.executable, "scripts/mutate", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    line = next(line for line in done.stdout.splitlines() if line.startswith(name))
    mutants, equivalent, killed, survived, not_called = map(int, re.findall(r" (\d+)(?= )", line))
    assert mutants == equivalent + killed + survived + not_called
    assert mutants >= 20
    # The aim is 95 %. Far less than that means that tests do not run, or that they test nothing.
    assert killed > 0.6 * (mutants - equivalent)
