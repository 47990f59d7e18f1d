# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests that run while they are audited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.guests import ROOT

LAB = ROOT / "scripts" / "lab"
IN_GUEST = Path(__file__).with_name("in_guest.py")
#: What a script runs so that memory.stat of all memcgs says what was counted until then: a reader
#: flushes only if much has changed, which memcg_vmstats_needs_flush() determines.
FLUSH = """
dd if=/dev/zero of=/run/flush bs=1M count=8 2>/dev/null
rm /run/flush
cat /sys/fs/cgroup/memory.stat >/dev/null
"""


@contextmanager
def kept(folder: Path, kernel: str, *words: str) -> Iterator[Path]:
    """Run a guest for the time of a ``with`` block; yield its QMP socket."""
    up = [sys.executable, LAB, "up", "--kernel", kernel, "--state", folder]
    started = subprocess.run(
        [*map(str, up), *words], capture_output=True, text=True, timeout=1800, check=False
    )
    assert started.returncode == 0, started.stderr
    try:
        yield folder / "qmp"
    finally:
        down = [sys.executable, str(LAB), "down", str(folder)]
        subprocess.run(down, capture_output=True, timeout=120, check=True)


def execute(folder: Path, script: str) -> str:
    """Run a shell script in a guest of :func:`kept`."""
    file = folder / "script"
    file.write_text(script)
    command = [sys.executable, str(LAB), "exec", "--timeout", "600", str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=660, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def from_outside(qmp: Path, *options: str, command: str = "audit") -> dict[str, Any]:
    """Audit a guest from outside, or run another command; return exit status, report, messages."""
    words = [sys.executable, "-m", "memcg_inspect", "--qemu", str(qmp), command, "--json"]
    done = subprocess.run(
        # A guard against hangs: beside other tests, an audit takes longer than it waits at most.
        [*words, *options],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.stdout, done.stderr
    return {
        "status": done.returncode,
        "report": json.loads(done.stdout),
        "said": done.stderr,
    }


def from_inside(kernel: str, audits: int, *words: str) -> list[dict[str, Any]]:
    """Boot a guest and audit it from inside."""
    live = [sys.executable, str(LAB), "live", "--kernel", kernel, *words]
    done = subprocess.run(
        # Before the load, which leaves little time of the emulated CPUs.
        [*live, "--", "nice", "-n", "-19", sys.executable, str(IN_GUEST), str(audits)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
