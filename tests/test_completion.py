# SPDX-License-Identifier: LGPL-2.1-or-later
"""Shells complete commands and options with the script that the program prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memcg_inspect.cli import main

#: What bash does for the word at the end of a line, in its own variables.
BASH = """
eval "$(memcg-inspect completion bash)"
complete -p memcg-inspect
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete memcg-inspect "${1##* }"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(line: str) -> list[str]:
    """Return what bash offers for a line."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", line],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *words = done.stdout.splitlines()
    assert "_python_argcomplete" in first, done.stderr
    return [word.strip() for word in words]


def test_bash_completes_commands() -> None:
    assert completed("memcg-inspect sl") == ["slabinfo"]
    assert set(completed("memcg-inspect st")) == {"stat", "stock"}


def test_bash_completes_options_and_their_values() -> None:
    assert completed("memcg-inspect audit --ident") == ["--identities"]
    assert completed("memcg-inspect stock --debuginfo d") == ["dwarf"]


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o nospace -o default -o bashdefault -F _python_argcomplete"),
        ("zsh", "compdef _python_argcomplete"),
        ("fish", "complete --command memcg-inspect"),
    ],
)
def test_scripts_register_the_program(
    shell: str, registers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert registers in said
    assert "memcg-inspect" in said


def test_without_argcomplete_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    assert main(["completion", "bash"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "pip install argcomplete" in said.err
