# SPDX-License-Identifier: LGPL-2.1-or-later
"""Commands of drgn sessions."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.guests import DEBIAN_KERNELS, Lab


@pytest.mark.image
def test_run_command_in_a_script(lab: Lab) -> None:
    image = lab.image(DEBIAN_KERNELS[-1], workload="mixed")
    script = (
        "from drgn.commands import run_command\n"
        "run_command(prog, 'memcg stock --scripted --fields cpu,memcg | sort -u')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "drgn", "-c", image.core, "--no-default-symbols", "-q", "-e",
         script],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) > 4, done.stderr
    assert lines == sorted(set(lines))
    assert {line.split("\t")[0] for line in lines} == {"0", "1", "2", "3"}


@pytest.mark.image
def test_result_is_there_although_nobody_reads_on(lab: Lab) -> None:
    """More than a pipe holds is written, and head goes after a line."""
    image = lab.image(DEBIAN_KERNELS[-1], workload="mixed")
    script = (
        "from drgn.commands import run_command\n"
        "for command in ('audit --all --json', 'drift --all --json'):\n"
        "    found = run_command(prog, f'memcg {command} | head -n 1')\n"
        "    print(type(found).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "drgn", "-c", image.core, "--no-default-symbols", "-q", "-e",
         script],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["{", "Report", "{", "Answer"], done.stderr
