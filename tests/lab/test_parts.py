# SPDX-License-Identifier: LGPL-2.1-or-later
"""`scripts/test --all` runs in parts: each test once, and no part again that passed."""

from pathlib import Path

import pytest
from labkit import kernels, parts
from labkit.errors import LabError
from labkit.parts import PARTS, Part, Results

ROOT = Path(__file__).resolve().parent.parent.parent
ONE, TWO = Part("one", "first", paths=("a",)), Part("two", "second", paths=("b",))
BUILD = Part("build", "kernels", kernels=("x",))


def owner(path: str, arch: str = "amd64") -> list[str]:
    """Return the parts that run the tests of a file."""
    found = []
    for part in (part for part in PARTS if part.arch == arch):
        words = parts.arguments(part)
        ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
        chosen = [word for word in words if not word.startswith("-")]
        below = [place for place in chosen if path == place or path.startswith(f"{place}/")]
        without = [place for place in ignored if path == place or path.startswith(f"{place}/")]
        if part.paths and below and not without:
            found.append(part.name)
    return found


def test_every_file_of_tests_is_in_one_part() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 50
    assert {path: owner(path) for path in files if len(owner(path)) != 1} == {}
    assert owner("tests/lab/test_parts.py") == ["lab"]
    assert owner("tests/collect/test_matrix.py") == ["matrix"]
    assert owner("tests/test_house.py") == ["rest"]
    assert {path: owner(path, "arm64") for path in files if len(owner(path, "arm64")) != 1} == {}
    assert owner("tests/collect/test_matrix.py", "arm64") == ["arm64-matrix"]


def test_what_parts_name_exists() -> None:
    for part in PARTS:
        assert all((ROOT / path.split("::")[0]).exists() for path in part.paths)
        assert bool(part.paths) != bool(part.kernels)
    built = {name for part in PARTS for name in part.kernels}
    of_arm64 = [*kernels.names(built_here=True, arch="arm64"), *kernels.names_of_part("tags")]
    assert built == {*kernels.names(built_here=True), *of_arm64} - {"7.3-pernode-debug"}


def run(results: Results, *, fails: str = "", again: bool = False) -> list[str]:
    """Run three parts; return which were run."""
    ran: list[str] = []

    def one(part: Part) -> bool:
        ran.append(part.name)
        return part.name != fails

    try:
        list(parts.run_parts([BUILD, ONE, TWO], results, again=again, run=one))
    except parts.FailedError as error:
        assert str(error) == f"failed: {fails}"
    else:
        assert not fails
    return ran


def test_parts_that_passed_are_not_run_again(own_cache: Path) -> None:
    assert run(Results("commit"), fails="one") == ["build", "one", "two"]
    assert run(Results("commit")) == ["one"]
    assert run(Results("commit")) == []
    assert run(Results("commit"), again=True) == ["build", "one", "two"]
    assert run(Results("other")) == ["build", "one", "two"]
    assert Results("commit").told(ONE).startswith("passed, ")
    assert Results("new").told(ONE) == "not run"


def test_changes_that_are_not_committed_are_tested_each_time(own_cache: Path) -> None:
    assert run(Results(None)) == ["build", "one", "two"]
    assert run(Results(None)) == ["build", "one", "two"]
    assert not own_cache.exists()


def test_without_its_kernels_no_test_is_run(own_cache: Path) -> None:
    assert run(Results("commit"), fails="build") == ["build"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--all", "--part", "x"], "no part 'x'; there are: kernels, "),
        (["--part", "lab"], "go with --all"),
        (["--again"], "go with --all"),
        (["--all", "--again", "-k", "x"], "go with --all and nothing else"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, own_cache: Path) -> None:
    with pytest.raises(LabError, match=message):
        parts.main(words)


def test_the_list_of_parts(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parts.main(["--parts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in PARTS]
    assert all("not run" in line for line in lines)
