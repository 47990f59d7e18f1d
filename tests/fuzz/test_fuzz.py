# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Commands on damaged images: no traceback, no signal, no hang, and no ``exact`` over a page that
could not be read.

There are 100 runs, and as many as ``--fuzz N`` says. A seed of its own chooses the damage of each
run. A failure prints it, and the command that repeats the run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.guests import DEBIAN_KERNELS, NOT_BUILT, ROOT, Lab

pytestmark = pytest.mark.image

#: Share of all runs, by image. The last two are added with --all: a kernel that profiles
#: allocations, and one that accounts kernel memory by node.
MEMORY = {"7.3": 0.45, "6.1": 0.3, "7.3-lab": 0.2, "7.3-pernode": 0.1}
HEADERS = {"kdump": 0.15, "elf": 0.05}
OPENING = 0.05
PROFILED = {"7.3-lab": "sysctl.vm.mem_profiling=1"}


def run(image: Path, number: int, *more: str) -> Counter[str]:
    """Run the fuzzer with seeds that were not tried before; return how the runs ended."""
    first = random.SystemRandom().randrange(1 << 32)
    command = [sys.executable, str(ROOT / "tests/fuzz/run.py"), str(image), *more]
    command += ["--seed", str(first), "--runs", str(number)]
    path = f"{ROOT / 'tests'}:{ROOT}"
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    print(" ".join(command))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    bad = [run for run in found if run["bad"]]
    assert bad == [], done.stderr
    assert len(found) == number, done.stderr
    return Counter(run["outcome"].partition(":")[0] for run in found)


def share(request: pytest.FixtureRequest, of_all: float) -> int:
    return round(request.config.getoption("--fuzz") * of_all)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=[] if kernel in DEBIAN_KERNELS else [pytest.mark.long])
        for kernel in MEMORY
        if kernel not in NOT_BUILT
    ],
)
def test_memory(lab: Lab, kernel: str, request: pytest.FixtureRequest) -> None:
    image = lab.image(kernel, "1", "mixed", append=PROFILED.get(kernel, ""))
    ended = run(image.core, share(request, MEMORY[kernel]))
    assert ended["incomplete"] and len(ended) > 2  # the damage was where commands read


def test_opening(lab: Lab, request: pytest.FixtureRequest) -> None:
    core = lab.image("7.3", "1", "mixed").core
    ended = run(core, share(request, OPENING), "--opening")
    assert sum(ended.values())


@pytest.mark.parametrize("format", HEADERS)
def test_headers(lab: Lab, tmp_path: Path, format: str, request: pytest.FixtureRequest) -> None:
    image = lab.image("7.3", "2", "idle", format=format)
    ended = run(image.core, share(request, HEADERS[format]), "--headers", str(tmp_path))
    assert ended["status 2"]
