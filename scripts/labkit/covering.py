# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which tests run each line of the source, and how long each test takes.

Every file of tests runs with coverage.py once. What was found is kept by the file of tests: a new
test makes its own file run again, and no other. If the source, or what tests share (conftest.py,
tests/support), changes afterwards, the tests chosen may no longer be all that run a line. Then a
mutant may survive that one of the others would notice, but none is killed that no test notices. To
run all files again, remove the folder from the cache.
"""

import ast
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from coverage import CoverageData

from .copies import pytest
from .store import file_hash, text_hash, write_atomically

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


@cache
def _text(file: Path) -> str:
    return file.read_text()


@cache
def _imports(file: Path, path: str) -> bool:
    """Return whether a file of Python imports a module. It is asked again for each mutant."""
    package, _, name = path.removesuffix(".py").replace("/", ".").rpartition(".")
    if name not in _text(file):
        return False  # most do not
    names = r" import (?:[^\n(]*|\([^)]*)\b"
    words = rf"\b{re.escape(package)}(?:\.|{names}){name}\b"
    return re.search(words, _text(file)) is not None


@dataclass(frozen=True)
class Covering:
    """
    The tests of some source.

    :ivar tree: a copy of the project
    :ivar folders: with the source
    :ivar files: files of tests, and folders with them
    :ivar options: of pytest
    :ivar kept: the folder for what is known
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
        source = self._source()
        files = [file for file in self._files() if not self._path(file).exists()]

        def learn_one(file: str) -> None:
            if time.monotonic() < until:
                self._learn(file, source, long)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(learn_one, files))

    def tests(self, path: str, line: int) -> list[tuple[float, str]]:
        """
        Return the tests that run a line, and the seconds of each.

        Tests whose file imports the module come first, then those whose file imports a module that
        imports it, and of each those that are fast.
        """
        ran, times = self._ran(path)
        lines = _statement((self.tree / path).read_text(), line)
        names = set[str]().union(*(ran.get(line, ()) for line in lines))
        importers = [path, *self._importers(path)]
        steps_of = cache(lambda file: self._steps(file, importers))
        steps = {test: steps_of(test.partition("::")[0]) for test in times}
        if "" in names:
            # Of the module: any test that runs a line of it may notice, and any other one that uses
            # what the module makes of lines elsewhere.
            names = names.union(*ran.values(), (test for test, n in steps.items() if n < 2))
        # "ID|phase", and of programs that a test starts "ID (phase)"
        found = {re.sub(r"\|.*$| \([a-z]+\)$", "", name) for name in names}
        some = sorted((times[test], test) for test in found & times.keys())
        return sorted(some, key=lambda one: steps[one[1]])

    def _importers(self, path: str) -> list[str]:
        """Return the modules that import a module."""
        modules = (at for name in self.folders for at in sorted((self.tree / name).rglob("*.py")))
        some = (str(at.relative_to(self.tree)) for at in modules)
        return [each for each in some if each != path and self._imports(each, path)]

    def _steps(self, file: str, importers: Sequence[str]) -> int:
        """Return 0 if a file of tests imports the first module, 1 if another one, and else 2."""
        imported = (n > 0 for n, path in enumerate(importers) if self._imports(file, path))
        return next(imported, 2)

    def _imports(self, file: str, path: str) -> bool:
        return _imports(self.tree / file, path)

    def _files(self) -> Iterator[str]:
        for path in (self.tree / name for name in self.files):
            for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
                yield str(file.relative_to(self.tree))

    def _path(self, file: str) -> Path:
        """Return the file with the seconds of each test of a file of tests."""
        words = re.sub(r"[^\w]+", "-", file)
        return self.kept / f"{words}-{file_hash(self.tree / file)[:16]}.json"

    def _source(self) -> str:
        """Keep the source, and return the name under which it is kept."""
        paths = (path for name in self.folders for path in (self.tree / name).rglob("*.py"))
        texts = {str(path.relative_to(self.tree)): path.read_text() for path in sorted(paths)}
        name = f"source-{text_hash(texts)[:16]}.json"
        write_atomically(self.kept / name, json.dumps(texts).encode())
        return name

    def _learn(self, file: str, source: str, long: float) -> None:
        """Find out about a file of tests; if it fails without a mutant, it is left out."""
        if (seconds := self._timed(file, *_TRACED)) is None:
            print(f"left out: {file} fails without a mutant", file=sys.stderr)
            return
        if sum(seconds.values()) > long:
            seconds = self._timed(file) or seconds
        found = {"source": source, "seconds": seconds}
        write_atomically(self._path(file), json.dumps(found).encode())

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
        of_source = dict[str, dict[int, set[int]]]()
        for known in (self._path(file) for file in self._files()):
            if not known.exists():
                continue
            about = json.loads(known.read_bytes())
            times.update(about["seconds"])
            if about["source"] not in of_source:
                of_source[about["source"]] = self._moved(about["source"], path)
            lines = of_source[about["source"]]
            data = CoverageData(str(known.with_suffix(".coverage")))
            data.read()
            # A program that was started in another folder has absolute paths.
            for name in data.measured_files():
                if name == path or name.endswith(f"/{path}"):
                    for line, contexts in data.contexts_by_lineno(name).items():
                        for now in lines.get(line, ()):
                            found[now].update(contexts)
        return found, times

    def _moved(self, source: str, path: str) -> dict[int, set[int]]:
        """Return what lines of a file, as it was when tests ran, are now."""
        before = json.loads((self.kept / source).read_bytes()).get(path, "")
        return moved(before.splitlines(), (self.tree / path).read_text().splitlines())


def moved(before: Sequence[str], now: Sequence[str]) -> dict[int, set[int]]:
    """
    Return what the lines of a text are in a later one, both from 1.

    New lines stand for those in whose place they are, or else for those beside them.
    """
    found = defaultdict[int, set[int]](set)
    for tag, a, b, c, d in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if tag == "equal":
            for line in range(b - a):
                found[a + line + 1].add(c + line + 1)
        elif tag != "delete":
            beside = range(max(a - 1, 0), min(a + 1, len(before)))
            for line in range(a, b) if tag == "replace" else beside:
                found[line + 1].update(range(c + 1, d + 1))
    return found


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
