# SPDX-License-Identifier: LGPL-2.1-or-later
"""``--help`` of each command ends with three examples, and with what they print."""

from __future__ import annotations

import re
import shlex

import pytest
from docblocks import extract
from dochelp import COLUMNS, EXAMPLES
from rich.cells import cell_len
from support.guests import ROOT

from memcg_inspect.cli import main, make_parser
from memcg_inspect.examples import examples
from memcg_inspect.names import COMMANDS

_COMMAND = re.compile(r"^  \$ (.*)$", re.MULTILINE)


def shown(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the examples in the help of a command."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    options, heading, found = capsys.readouterr().out.partition("\nexamples:\n")
    assert heading
    assert "usage:" in options
    return found


def test_each_command_has_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    assert {len(found) for found in EXAMPLES.values()} == {3}


@pytest.mark.parametrize("command", COMMANDS)
def test_three_with_output(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(command, capsys)
    typed = [shlex.split(words) for words in _COMMAND.findall(text) if f" {command} " in words]
    assert len(typed) == 3
    for program, *words in typed:
        assert program == "memcg-inspect"
        assert make_parser().parse_args(words).command == command
    assert text.count("\n\n") >= 2
    for example in text.split("  $ ")[1:]:
        assert len(example.splitlines()) > 2, "no output"
    lines = text.splitlines()
    assert [line for line in lines if cell_len(line) > COLUMNS + 2 and "$" not in line] == []
    assert all(char.isprintable() or char in "\n\t" for char in text)
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_what_the_run_wrote(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    written = extract((ROOT / "memcg_inspect/examples.md").read_text(), f"help_{command}")
    body = written.removeprefix("```text\n").removesuffix("\n```")
    assert re.sub(r"^  ", "", shown(command, capsys), flags=re.MULTILINE).strip() == body.strip()


def test_in_a_session_they_are_those_of_the_session() -> None:
    text = examples("overview", "%memcg")
    assert len(re.findall(r"^  \$ %memcg overview ", text, re.MULTILINE)) == 3
    assert "vmcore" not in text
    assert "memcg-inspect" not in text
    assert examples("schema", "memcg-inspect") == ""
