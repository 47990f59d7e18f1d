# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which tests run each line of the source, and how long each test takes.

Every file of tests runs with coverage.py once. What was found is kept by the source and by the file
of tests: a new test makes its own file run again, and no other. What tests share (conftest.py,
tests/support) is no part of the key. If it changes, the tests chosen may no longer be all that
run a line.
"""

import ast
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

from .copies import pytest
from .store import file_hash, write_atomically

#: How coverage.py writes down what the tests run, and the programs that they start.
_COVERAGE = """
[run]
parallel = true
relative_files = true
include = */{}/*
context = ${PYTEST_CURRENT_TEST-}
"""
_TRACED = (
    *("--cov", "--cov-config=.coveragerc", "--cov-context=test", "--cov-report="),
    *("-p", "labkit.coverage_of_programs"),
)


@dataclass(frozen=True)
class Covering:
    """
    The tests of some source.

    :ivar tree: a copy of the project
    :ivar folders: with the source
    :ivar files: files of tests, and folders with them
    :ivar options: of pytest
    :ivar kept: the folder for what is known, which is of this source
    """

    tree: Path
    folders: tuple[str, ...]
    files: tuple[str, ...]
    options: tuple[str, ...]
    kept: Path

    def learn(self, until: float, long: float, workers: int) -> None:
        """
        Run the files of tests of which nothing is known yet.

        :param until: value of time.monotonic() after which no file is begun
        :param long: seconds. If a file takes more, its tests are timed again: they may have made
            images.
        :param workers: number of files that run at a time
        """
        text = _COVERAGE.replace("{}", "/*\n    */".join(self.folders))
        (self.tree / ".coveragerc").write_text(text)
        files = [file for file in self._files() if not self._path(file).exists()]

        def learn_one(file: str) -> None:
            if time.monotonic() < until:
                self._learn(file, long)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(learn_one, files))

    def tests(self, path: str, line: int) -> list[tuple[float, str]]:
        """Return the tests that run a line, and the seconds of each, the fastest one first."""
        ran, times = self._ran(path)
        lines = _statement((self.tree / path).read_text(), line)
        names = set[str]().union(*(ran.get(line, ()) for line in lines))
        if "" in names:  # of the module: any test that runs a line of it may notice
            names = names.union(*ran.values())
        # "ID|phase", and of programs that a test starts "ID (phase)"
        found = {re.sub(r"\|.*$| \([a-z]+\)$", "", name) for name in names}
        return sorted((times[test], test) for test in found & times.keys())

    def _files(self) -> Iterator[str]:
        for path in (self.tree / name for name in self.files):
            for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
                yield str(file.relative_to(self.tree))

    def _path(self, file: str) -> Path:
        """Return the file with the seconds of each test of a file of tests."""
        words = re.sub(r"[^\w]+", "-", file)
        return self.kept / f"{words}-{file_hash(self.tree / file)[:16]}.json"

    def _learn(self, file: str, long: float) -> None:
        """Find out about a file of tests; if it fails without a mutant, it is left out."""
        if (seconds := self._timed(file, *_TRACED)) is None:
            print(f"left out: {file} fails without a mutant", file=sys.stderr)
            return
        if sum(seconds.values()) > long:
            seconds = self._timed(file) or seconds
        write_atomically(self._path(file), json.dumps(seconds).encode())

    def _timed(self, file: str, *options: str) -> dict[str, float] | None:
        """Run a file of tests; return the seconds of each test, ``None`` if one fails."""
        path = self._path(file)
        times = path.with_suffix(".seconds")
        variables = {
            "SECONDS": str(times),
            "COVERAGE_FILE": str(path.with_suffix(".coverage")),
            "COVERAGE_RCFILE": str(self.tree / ".coveragerc"),
        }
        words = (*self.options, "-p", "labkit.seconds", *options, file)
        for _ in range(2):  # a guest may not have come up in time
            if pytest(self.tree, words, variables) in (0, 5):  # 5: no test is selected
                seconds: dict[str, float] = json.loads(times.read_text())
                times.unlink()
                return seconds
        return None

    def _ran(self, path: str) -> tuple[dict[int, set[str]], dict[str, float]]:
        """Return the tests that run each line of a file, with the phase, and what tests take."""
        found, times = defaultdict[int, set[str]](set), dict[str, float]()
        for known in (self._path(file) for file in self._files()):
            if not known.exists():
                continue
            times.update(json.loads(known.read_bytes()))
            data = CoverageData(str(known.with_suffix(".coverage")))
            data.read()
            # A program that was started in another folder has absolute paths.
            for name in data.measured_files():
                if name == path or name.endswith(f"/{path}"):
                    for line, contexts in data.contexts_by_lineno(name).items():
                        found[line].update(contexts)
        return found, times


def _statement(source: str, line: int) -> set[int]:
    """
    Return the lines of the statement that a line is in.

    Of a table of constants, Python remembers the first line only.
    """
    statements = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and not hasattr(node, "body")
    ]
    return {line}.union(*(lines for lines in statements if line in lines))
