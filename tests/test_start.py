# SPDX-License-Identifier: LGPL-2.1-or-later
"""The program imports what it needs, when it needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.printed import on_full_disk

from memcg_inspect.cli import main
from memcg_inspect.image import copies
from memcg_inspect.image.qmp import GREETING_TIMEOUT
from memcg_inspect.names import COMMANDS
from memcg_inspect.views import NAMES


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_list_of_commands_is_there_at_once(arguments: list[str]) -> None:
    """It needs no more than the parser: drgn and the readers take ten times as long to import."""
    code = (
        "import atexit, sys; from memcg_inspect.cli import main; "
        "atexit.register(lambda: print(*sorted(sys.modules))); "
        f"main({arguments!r})"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loaded = set(printed.splitlines()[-1].split())
    assert loaded.isdisjoint({"drgn", "dataclasses", "rich", "logging", "json"})
    ours = {name for name in loaded if name.startswith("memcg_inspect.")}
    assert "memcg_inspect.cli" in ours
    assert len(ours) < 10


def test_each_view_has_its_line_of_help() -> None:
    assert ("audit", *NAMES) == COMMANDS


def test_defaults_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of options repeats what is written elsewhere, since importing that takes long."""
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert copies.LIMIT in text
    assert f"(default: {GREETING_TIMEOUT:g})" in text


@pytest.mark.parametrize("arguments", [["--help"], ["audit", "--help"], ["--version"]])
def test_help_that_cannot_be_written(arguments: list[str]) -> None:
    status, said = on_full_disk(*arguments)
    assert status == 2
    assert said == "memcg-inspect: output cannot be written: No space left on device\n"


def test_an_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    """Its names are those of drgn, which is imported to check them only."""
    assert main(["audit", "--architecture", "vax"]) == 2
    said = capsys.readouterr().err
    assert "invalid choice: 'vax'" in said and "'S390X'" in said
