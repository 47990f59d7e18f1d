# SPDX-License-Identifier: LGPL-2.1-or-later
"""What commands print on terminals of several widths and in a pipe, in one process for all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

from rich.cells import cell_len

from support.terminals import on_terminal

__all__ = ("HEIGHT", "WIDTHS", "check_screen", "numbers", "run", "tables")

WIDTHS = (80, 120, 200)
#: Lines of the terminal.
HEIGHT = 50
#: Prints each command with each set of options, on a terminal of each width if standard output is
#: one. A command runs once only: neither options nor the width change its answer.
DRIVER = """
import json, sys
from support.terminals import resize
from memcg_inspect import cli, running
core, widths, options, commands, expected = json.loads(sys.argv[1])
prog, run, answers = None, running.answer, {}
def opened(source, open_program=running.open_program):
    global prog
    prog = prog or open_program(source)
    return prog
def answer(image, args):
    asked = json.dumps(words)
    answers[asked] = answers.get(asked) or run(image, args)
    return answers[asked]
running.open_program, running.answer = opened, answer
for words in commands:
    for width, option in zip(widths, options):
        if sys.stdout.isatty():
            resize(1, width)
        print("\\f", end="")
        status = cli.main([*words, *option, "-c", core, "--debuginfo", "btf"])
        assert status == expected, (words, status)
"""
_NUMBER = re.compile(r"(?<![\w.,:/*=()+-])[+-]?\d[\d,]*(?:\.\d+%)?(?![\w.,:/*=()-])")
_SIZE = re.compile(r"(?<![\w.,-])(\d[\d,]*\.\d) ([KMGT])iB\b")


def run(
    core: str, commands: Sequence[Sequence[str]], *ways: tuple[int, list[str]], status: int = 0
) -> list[list[str]]:
    """
    Return what each command prints in each way.

    :param ways: widths of the terminal and options; in a pipe if there are none
    :param status: expected exit status of each command
    """
    widths, options = zip(*(ways or [(0, [])]), strict=True)
    asked = json.dumps([core, widths, options, commands, status])
    driver = [sys.executable, "-c", DRIVER, asked]
    env = {"PYTHONPATH": ":".join(sys.path)}
    if ways:
        ended, shown = on_terminal(driver, widths[0], env)
    else:
        done = subprocess.run(
            driver, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | env
        )
        ended, shown = done.returncode, done.stdout
    assert ended == 0, shown[-2000:]
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
    """Return the numbers in the tables of a text."""
    return {number for _, lines in tables(text) for number in _NUMBER.findall("\n".join(lines))}


def check_screen(shown: str, width: int, piped: str, is_exact: bool) -> None:
    """
    Check that a text fits on a terminal, and that each of its numbers is one of the whole text.

    :param piped: the same in a pipe
    :param is_exact: whether sizes are in bytes
    """
    lines = shown.splitlines()
    assert "\x1b" not in shown + piped
    assert all(char.isprintable() or char == "\n" for char in shown + piped)
    assert len(lines) <= HEIGHT
    # A command is not folded, so that it can be copied.
    wide = [line for line in lines if cell_len(line) > width and "memcg-inspect " not in line]
    assert wide == []
    assert [line for line in (*lines, *piped.splitlines()) if line != line.rstrip()] == []
    if is_exact:
        assert numbers(shown) <= numbers(piped)
        return
    whole = {int(n.replace(",", "")) for n in re.findall(r"(?<![\w.])\d[\d,]*\b", piped)}
    for amount, unit in _SIZE.findall(shown):
        size, one = float(amount.replace(",", "")), 1024 ** ("KMGT".index(unit) + 1)
        is_rounded = any(abs(n - size * one) <= 0.0501 * one for n in whole)
        assert is_rounded or f"{amount} {unit}iB" in piped, (amount, unit)
