# SPDX-License-Identifier: LGPL-2.1-or-later
"""The first screen on a terminal, of images of real kernels, and the commands that it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from support.findings import by_path
from support.guests import Lab, Plant
from support.missing_pages import filtered
from support.terminals import on_terminal

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.render.first_screen import MOST_LINES

pytestmark = pytest.mark.image

ITEM = "NR_SLAB_UNRECLAIMABLE_B"
CLI = [sys.executable, "-m", "memcg_inspect"]


def check_screen(core: Path, columns: int, status: int) -> str:
    """Check the shape of the first screen; return it."""
    command = [*CLI, "audit", "-c", str(core), "--debuginfo", "btf"]
    found, shown = on_terminal(command, columns)
    assert found == status, shown
    lines = shown.splitlines()
    assert sum(-(-max(1, cell_len(line)) // columns) for line in lines) <= MOST_LINES
    assert [line for line in lines if cell_len(line) > columns and str(core) not in line] == []
    assert "\x1b" not in shown
    return shown


@pytest.mark.parametrize("columns", [80, 100])
def test_healthy(lab: Lab, columns: int) -> None:
    shown = check_screen(lab.image("7.3", workload="mixed").core, columns, 0)
    assert shown.startswith("EXACT: ")
    assert re.search(
        r"Checked: \d+ identities, [\d,]+ rows, [\d.]+ MiB of charges:\s[\d,]+ objects", shown
    )
    assert len(shown.splitlines()) < 12


def commands(shown: str) -> set[str]:
    """Return the commands that a screen shows."""
    marked = re.findall(r"^ +\$ (memcg-inspect .*)$|\((memcg-inspect .*)\)$", shown, re.MULTILINE)
    return {first or second for first, second in marked}


def test_every_command_that_is_shown_works(lab: Lab, plant: Plant) -> None:
    image = lab.image("7.3")
    web = by_path(image.report())["/files/web"]
    slot = StatReader(image_of(image.program()), [ITEM]).slots[ITEM]
    stats = f"Object(prog, 'struct mem_cgroup *', {web}).nodeinfo[1].lruvec_stats"
    plant(image, (f"{stats}.state[{slot}]", "old + 1000003"))
    [core] = plant.made
    for columns in (80, 100):
        shown = check_screen(core, columns, 1)
        assert shown.startswith("FINDINGS: ")
        assert "/files/web" in shown
        typed = commands(shown)
        assert typed
    for command in typed:
        program, *words = shlex.split(command)
        assert program == "memcg-inspect"
        done = subprocess.run([*CLI, *words], capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), command
        assert done.stdout
        assert done.stderr == ""


def test_a_dump_that_lacks_memory(lab: Lab, tmp_path: Path) -> None:
    core = tmp_path / "kdump"
    filtered(lab.image("7.3", "4", "mixed"), core, 31)
    for columns in (80, 100):
        shown = check_screen(core, columns, 3)
        assert shown.startswith("INCOMPLETE: ")
        assert "could not be verified" in shown.splitlines()[0]
        for part in ("Could not be verified", "Not read", "Notes"):
            assert f"\n\n{part}\n" in shown
        assert "level 23" in " ".join(shown.split())
    core.unlink()
