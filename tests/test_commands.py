# SPDX-License-Identifier: LGPL-2.1-or-later
"""Commands of drgn sessions."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.guests import DEBIAN_KERNELS, Lab
from support.sessions import converse

from memcg_inspect.image.image import image_of
from memcg_inspect.names import COMMANDS
from memcg_inspect.views.overview import overview


@pytest.mark.image
def test_run_command_in_a_script(lab: Lab) -> None:
    image = lab.image(DEBIAN_KERNELS[-1], workload="mixed")
    script = (
        "from drgn.commands import run_command\n"
        "run_command(prog, 'memcg overview --scripted --fields memcg_address | sort -u')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "drgn", "-c", image.core, "--no-default-symbols", "-q", "-e",
         script],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    [table] = overview(image_of(image.program())).tables
    addresses = {table.values(row)["memcg_address"] for row in table.rows}
    assert len(addresses) > 20
    assert done.stdout.splitlines() == [f"{one:#x}" for one in sorted(addresses)], done.stderr


@pytest.mark.image
def test_result_is_there_although_nobody_reads_on(lab: Lab) -> None:
    """The command writes more than a pipe holds, and ``head`` exits after one line."""
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


@pytest.mark.image
def test_without_arguments_it_lists_the_commands(lab: Lab) -> None:
    image = lab.image(DEBIAN_KERNELS[-1])
    script = "from drgn.commands import run_command\nprint(run_command(prog, 'memcg'))\n"
    done = subprocess.run(
        [sys.executable, "-m", "drgn", "-c", image.core, "--no-default-symbols", "-q", "-e",
         script],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    *lines, result = done.stdout.splitlines()
    assert result == "None", done.stderr
    assert [word for word, *_ in (line.split() for line in lines if line) if word in COMMANDS] == (
        list(COMMANDS)
    )
    assert "%memcg" in lines[0]


@pytest.mark.parametrize(
    "error", ['KeyError("boom")', 'RuntimeError("boom")', 'StopIteration("boom")']
)
@pytest.mark.image
def test_a_bug_is_not_told_by_its_message_alone(lab: Lab, error: str) -> None:
    """drgn shows the message of an exception without its traceback."""
    said = converse(
        lab.image(DEBIAN_KERNELS[-1]),
        "import memcg_inspect.views.stock as view",
        f"exec('def bug(*_): raise {error}', vars(view))",
        "view.read_obj_stocks = view.bug",
        "%memcg stock",
        "%memcg audit --node 9 --rows",
    )
    lines = said[3].splitlines()
    assert "Traceback (most recent call last):" in lines
    assert ", in bug" in said[3]
    assert "boom" in said[3]
    assert lines[-1].startswith("drgn: error: this is a bug in memcg-inspect")
    # a wrong argument is none
    assert said[4].splitlines() == ["drgn: error: there is no node 9; there are: 0, 1, 2, 3"]
