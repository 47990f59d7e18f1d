# SPDX-License-Identifier: LGPL-2.1-or-later
"""What commands print on terminals of several widths, and in a pipe, of images of real kernels."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from rich.cells import cell_len
from support.guests import KERNELS, Lab
from support.terminals import on_terminal

from memcg_inspect.views import NAMES

pytestmark = [pytest.mark.image, pytest.mark.newest_kernel]

WIDTHS = (80, 120, 200)
#: Prints each command with each set of options, on a terminal of each width if standard output is
#: one. A command runs once only: neither options nor the width change its answer.
DRIVER = """
import json, sys
from support.terminals import resize
from memcg_inspect import cli
core, widths, options, commands = json.loads(sys.argv[1])
prog, run, answers = None, cli.answer, {}
def opened(source, open_program=cli.open_program):
    global prog
    prog = prog or open_program(source)
    return prog
def answer(image, args):
    asked = json.dumps(words)
    answers[asked] = answers.get(asked) or run(image, args)
    return answers[asked]
cli.open_program, cli.answer = opened, answer
for words in commands:
    for width, option in zip(widths, options):
        if sys.stdout.isatty():
            resize(1, width)
        print("\\f", end="")
        status = cli.main([*words, *option, "-c", core, "--debuginfo", "btf"])
        assert status == 0, (words, status)
"""
ARGUMENTS = {
    "drift": ["--all"],
    "stat": ["/files/web"],
    "usage": ["/files/web"],
    "who": ["{memcg}"],
}
#: One that needs another kernel.
COMMANDS = [[name, *ARGUMENTS.get(name, [])] for name in NAMES if name != "allocinfo"]
COMMANDS += [
    ["overview", "--by-node", "--top", "0"],
    ["slabinfo", "--by", "memcg,cache,node"],
    ["percpu", "--each", "--top", "7"],
    ["dying", "--each"],
    ["audit", "--rows"],
    ["audit", "--all"],
]
_NUMBER = re.compile(r"(?<![\w.,:/*=()+-])[+-]?\d[\d,]*(?:\.\d+%)?(?![\w.,:/*=()-])")


def run(core: str, commands: list[list[str]], *ways: tuple[int, list[str]]) -> list[list[str]]:
    """
    Return what each command prints in each way.

    :param ways: widths of the terminal and options; in a pipe if there are none
    """
    widths, options = zip(*(ways or [(0, [])]), strict=True)
    driver = [sys.executable, "-c", DRIVER, json.dumps([core, widths, options, commands])]
    if ways:
        status, shown = on_terminal(driver, widths[0])
    else:
        done = subprocess.run(driver, stdout=subprocess.PIPE, text=True, check=False)
        status, shown = done.returncode, done.stdout
    assert status == 0, shown[-2000:]
    made = shown.split("\f")[1:]
    assert len(made) == len(commands) * len(widths)
    return [made[n : n + len(widths)] for n in range(0, len(made), len(widths))]


def tables(text: str) -> list[tuple[list[str], list[str]]]:
    """Return the columns of each table, and its lines."""
    found, lines = [], text.splitlines()
    for n, line in enumerate(lines):
        if re.fullmatch(r" ─+", line):
            end = next((i for i in range(n, len(lines)) if not lines[i].strip()), len(lines))
            found.append((re.split(" {2,}", lines[n - 1].strip()), lines[n + 1 : end]))
    return found


def numbers(text: str) -> set[str]:
    return {number for _, lines in tables(text) for number in _NUMBER.findall("\n".join(lines))}


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_line_is_too_wide_and_no_number_is_cut(
    lab: Lab, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = lab.image(kernel, "4", "mixed")
    core, memcg = str(image.core), image.report().memcgs[-1].address
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    asked = [[word.format(memcg=f"{memcg:#x}") for word in words] for words in COMMANDS]
    ways = [(width, option) for width in WIDTHS for option in ([], ["--exact"])]
    left_out = shares = 0
    for words, [piped], shown in zip(asked, run(core, asked), run(core, asked, *ways), strict=True):
        whole = tables(piped)
        assert whole, words
        assert "not shown" not in piped
        assert not re.search(r"\d [KMGT]iB\b", "".join("".join(lines) for _, lines in whole))
        for (width, option), text in zip(ways, shown, strict=True):
            assert "\x1b" not in text
            wide = [line for line in text.splitlines() if cell_len(line) > width]
            assert wide == [], words
            assert [line for line in text.splitlines() if line != line.rstrip()] == []
            assert not option or numbers(text) <= numbers(piped), (words, width)
            for (columns, lines), (there, _) in zip(tables(text), whole, strict=True):
                if "share" in columns:
                    assert "share" not in there and not option
                    shares += 1
                    columns.remove("share")
                    assert all(re.search(r"\d %|[-?] ", line) for line in lines)
                gone = [name for name in there if name not in columns]
                assert all(name in text for name in gone)
                assert columns == [name for name in there if name not in gone]
                left_out += len(gone)
    assert left_out
    assert shares > 10
