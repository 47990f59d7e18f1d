# SPDX-License-Identifier: LGPL-2.1-or-later
"""The man page is what scripts/manpage makes of the argument parser."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from memcg_inspect.cli import main
from memcg_inspect.names import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/memcg-inspect.1").read_text()


def test_page_is_up_to_date() -> None:
    """After a change of an argument: scripts/manpage >docs/memcg-inspect.1."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/manpage"], capture_output=True, text=True, check=True
    )
    assert done.stdout == PAGE


@pytest.mark.parametrize("command", [*COMMANDS, "schema", "completion"])
def test_options_of_every_command_are_in_the_page(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    page = PAGE.replace("\\-", "-")
    own = page.split(f".SS {command}")[1].split(".SS")[0] + page.split(".SH COMMANDS")[0]
    for option in re.findall(r"^  +(?:-\w, |-\w \w+, )?(--[\w-]+)", capsys.readouterr().out, re.M):
        assert f"\\fB{option}\\fR" in own, option


def test_every_line_is_a_macro_or_text() -> None:
    known = {".TH", ".SH", ".SS", ".TP", ".B", ".BR"}
    assert {line.split()[0] for line in PAGE.splitlines() if line.startswith(".")} == known
    assert not re.search(r"^'", PAGE, re.M)
