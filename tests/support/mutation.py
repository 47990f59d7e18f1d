# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The rate of small changes to the source that a test notices.

This is a report: scripts/mutate prints the changes that no test notices. What it measures is in
docs/reliability.md.
"""

from __future__ import annotations

import re
import subprocess
import sys

from support.guests import ROOT

__all__ = ("check_most_are_noticed",)


def check_most_are_noticed(name: str) -> None:
    """
    Run scripts/mutate.

    :param name: of the set of mutants
    """
    command = [sys.executable, "scripts/mutate", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    line = next(line for line in done.stdout.splitlines() if line.startswith(name))
    mutants, equivalent, killed, survived, not_run = map(int, re.findall(r" (\d+)(?= )", line))
    assert mutants == equivalent + killed + survived + not_run
    assert mutants >= 20, "not enough mutants in the time; another run goes on where this one ended"
    # The aim is 95 %. Far less than that means that tests do not run, or that they test nothing.
    assert killed > 0.6 * (mutants - equivalent)
