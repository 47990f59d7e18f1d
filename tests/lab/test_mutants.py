# SPDX-License-Identifier: LGPL-2.1-or-later
"""Small changes to the source: where they are made, and how they are chosen."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
from labkit.covering import Covering, moved
from labkit.mutants import Mutant, mutants, sample

ROOT = Path(__file__).resolve().parent.parent.parent


def changes(source: str) -> list[tuple[str, str]]:
    return [(m.before, m.after) for m in mutants("a.py", source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", [("a < b", "pass"), ("a < b", "(a <= b)")]),
        ("x = a is not None", [("a is not None", "(a is None)")]),
        ("x = a and b or c", [("a and b or c", "((a and b) and c)"), ("a and b", "(a or b)")]),
        ("x = a // 2", [("a // 2", "(a * 2)"), ("2", "3")]),
        ("x = -1", [("-1", "(1)"), ("1", "2")]),
        ("x = True", [("True", "False")]),
        ("x = 'é'", [("'é'", "('XXé')")]),
        ("x = 'é' + y", [("'é' + y", "('é' - y)"), ("'é'", "('XXé')")]),
        ("x = a if b else c", [("a if b else c", "(a)"), ("a if b else c", "(c)")]),
        ("x = [a for a in b if a]", [("[a for a in b if a]", "[a for a in b if True]")]),
        ("if a:\n    b()", [("a", "(not a)"), ("b()", "pass")]),
        ("def f(a: 'T' = 1) -> 'T':\n    'Text.'\n    g = a", [("1", "2")]),
        ("def f(a):\n    return a", [("return a", "return None")]),
        ("x = a or 0", [("a or 0", "(a and 0)")]),
        ("def f():\n    return None\n    return", []),
        ("def f():\n    return False", [("False", "True")]),
        # Names and types say nothing, and places in these strings are not known before Python 3.12.
        ("__all__ = ('a',)\nx: 'T' = f'{a + 1}'\nimport b", []),
    ],
)  # fmt: skip
def test_what_is_changed(source: str, expected: list[tuple[str, str]]) -> None:
    assert changes(source) == expected


def test_a_change_is_applied_at_its_place() -> None:
    source = 'x = "é"\ny = f(1,\n      2) if z else 1\n'
    [text, first, *_] = list(mutants("a.py", source))
    assert text.applied(source) == source.replace('"é"', "('XXé')")
    assert (first.line, first.after) == (2, "(f(1, 2))")
    assert first.applied(source) == 'x = "é"\ny = (f(1, 2))\n'
    assert str(first) == "a.py:2: f(1, 2) if z else 1 -> (f(1, 2))"
    assert first.key(source) == "a.py: y = f(1, | (f(1, 2))"


def test_the_choice_depends_on_the_seed_alone() -> None:
    folders = ("memcg_inspect/render", "memcg_inspect/btf")
    chosen, other = sample(ROOT, folders, 1), sample(ROOT, folders, 2)
    assert chosen == sample(ROOT, folders, 1)
    assert chosen != other
    assert sorted(chosen) == sorted(other)
    assert len(chosen) > 500
    assert {m.path.split("/")[1] for m in chosen[:100]} == {"render", "btf"}


def test_every_change_is_a_change_and_a_program() -> None:
    for mutant in sample(ROOT, ("memcg_inspect/checks",), 3)[:100]:
        source = (ROOT / mutant.path).read_text()
        changed = ast.unparse(ast.parse(mutant.applied(source)))
        assert changed != ast.unparse(ast.parse(source)), mutant


def test_equivalent_mutants_exist() -> None:
    """A line that names no mutant is left over from an earlier version of the source."""
    listed = (ROOT / "tests/equivalent-mutants.txt").read_text().splitlines()
    wanted = {line for line in listed if line and not line.startswith("#")}
    found = set()
    for path in {line.split(": ")[0] for line in wanted}:
        source = (ROOT / path).read_text()
        found |= {mutant.key(source) for mutant in mutants(path, source)}
    assert wanted <= found
    assert len(wanted) == len([line for line in listed if line in wanted])


TESTS = """
import subprocess, sys
import pytest
from pack import (
    one,
    two,
)

def test_f():
    assert one.f(0) == 1

@pytest.mark.parametrize("a", [1, 2])
def test_g(a):
    assert two.g(a)

def test_program(tmp_path):
    subprocess.run([sys.executable, "-m", "pack.two"], cwd=tmp_path, check=True)
"""
BASE = "M = 1\n"
ONE = "N = 1\nfrom pack.base import M\n\ndef f(a):\n    if a:\n        a = 3\n    return N\n"
TWO = "def g(a):\n    return a\n\n\ndef h():\n    pass\n\n\nif __name__ == '__main__':\n    h()\n"


def test_a_mutant_meets_the_tests_that_run_its_line(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/one.py").write_text(ONE)
    (tmp_path / "pack/two.py").write_text(TWO)
    (tmp_path / "pack/base.py").write_text(BASE)
    (tmp_path / "test_all.py").write_text(TESTS)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "kept").mkdir()
    tests = Covering(tmp_path, ("pack",), ("test_all.py",), (), tmp_path / "kept")
    tests.learn(time.monotonic() + 60, 60, 1)

    def covering(path: str, line: int) -> set[str]:
        return {test.removeprefix("test_all.py::test_") for _, test in tests.tests(path, line)}

    assert covering("pack/one.py", 7) == {"f"}
    # A constant of the module: all tests of a file that imports it.
    assert covering("pack/one.py", 1) == {"f", "g[1]", "g[2]", "program"}
    # Of a module that a module imports, too.
    assert covering("pack/base.py", 1) == covering("pack/one.py", 1)
    assert covering("pack/one.py", 6) == set()
    assert covering("pack/two.py", 2) == {"g[1]", "g[2]"}
    assert covering("pack/two.py", 6) == {"program"}
    # What is known stays known when lines move and change.
    (tmp_path / "pack/one.py").write_text(f"# A comment\n{ONE}".replace("a = 3", "a = 4"))
    assert covering("pack/one.py", 8) == {"f"}
    assert covering("pack/one.py", 7) == set()


@pytest.mark.parametrize(
    ("line", "is_import"),
    [
        ("from memcg_inspect.linux.mm.slab import Slab", True),
        ("from memcg_inspect.linux.mm import percpu, slab", True),
        ("import memcg_inspect.linux.mm.slab", True),
        ("from memcg_inspect.linux.mm.slab_groups import SlabGroup", False),
        ("from memcg_inspect.linux.mm import slab_groups", False),
    ],
)
def test_tests_that_import_a_module(tmp_path: Path, line: str, is_import: bool) -> None:
    """They are the first to judge its mutants."""
    (tmp_path / "test_one.py").write_text(f"{line}\n")
    tests = Covering(tmp_path, (), (), (), tmp_path)
    assert tests._imports("test_one.py", "memcg_inspect/linux/mm/slab.py") == is_import


def test_lines_that_moved() -> None:
    assert moved(["a", "b"], ["a", "b"]) == {1: {1}, 2: {2}}
    assert moved(["a", "b", "c"], ["c"]) == {3: {1}}
    assert moved(["a", "b", "c"], ["a", "x", "y", "c"]) == {1: {1}, 2: {2, 3}, 3: {4}}
    assert moved(["a", "b"], ["a", "x", "b"]) == {1: {1, 2}, 2: {2, 3}}


def test_a_long_place_is_shortened() -> None:
    mutant = Mutant("a.py", 1, 0, "x" * 100, "y")
    assert str(mutant) == f"a.py:1: {'x' * 40} ... {'x' * 15} -> y"
