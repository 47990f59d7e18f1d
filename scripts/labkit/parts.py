# SPDX-License-Identifier: LGPL-2.1-or-later
"""Run the tests: `scripts/test`, once .venv is ready.

All tests take hours on a small machine, so `scripts/test --all` runs them in parts. A part that
passed is not run again for the same commit. The results are kept in the cache.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import kernels
from .errors import LabError
from .paths import PROJECT, cache_folder
from .store import write_atomically

# Each process gets half of the tests in their order, since tests of a file use what one process has
# read of an image. The one that ends first takes tests from the end of the other's.
_PYTEST = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"]

_USAGE = """\
scripts/test [PYTEST ARGUMENTS]        all tests but the long ones
scripts/test --all [--again]           all tests, in parts; parts that passed are not repeated
scripts/test --all --part NAME         one part
scripts/test --all PYTEST ARGUMENTS    build all kernels, then run pytest once
scripts/test --soak                    stress on a kernel with lockdep, and an audit after it
scripts/test --parts                   list the parts and their last results"""


class FailedError(LabError):
    """Some parts failed."""


@dataclass(frozen=True)
class Part:
    """A part of `scripts/test --all`: kernels to build, or tests to run."""

    name: str
    what: str
    # files and folders with tests; less those that another part names
    paths: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    # of the kernels that tests with a kernel as parameter run on
    arch: str = "amd64"


def _built_here(*, broken: bool = False, arch: str = "amd64") -> tuple[str, ...]:
    names = kernels.names(built_here=True, arch=arch)
    wanted = [name for name in names if ("-broken-" in name) == broken]
    return tuple(name for name in wanted if not name.endswith("-debug"))


_MATRIX = ("tests/collect/test_matrix.py", "tests/collect/test_stopped.py")
_AUDITS = (
    *("tests/collect/test_matrix.py", "tests/arches/test_page_tables.py"),
    "tests/collect/test_planted_everywhere.py::test_every_fault_is_named",
)

#: Each takes less than an hour on two CPUs with an empty cache.
PARTS = (
    Part("kernels", "build the kernels that the tests need", kernels=_built_here()),
    Part("broken", "build the kernels with a mistake each", kernels=_built_here(broken=True)),
    Part("rest", "all tests that no other part runs", ("tests",)),
    Part("lab", "guests, workloads, kernels", ("tests/lab",)),
    Part("views", "every view on every kernel", ("tests/views",)),
    Part("identities", "each identity on every kernel, at rest and stopped", ("tests/identities",)),
    Part("collect", "audits of images, faults planted into them", ("tests/collect",)),
    Part("matrix", "audits on every kernel, topology and workload", _MATRIX),
    Part("live", "audits of running guests, two hundred under load", ("tests/live",)),
    Part(
        "reliability",
        "every fault planted into every kind of image",
        ("tests/collect/test_reliability.py",),
    ),
    Part(
        "mutants",
        "report: which changes to checks and rendering no test notices",
        ("tests/mutants/test_pure.py",),
    ),
    Part(
        "readers",
        "report: which changes to readers and collection no test notices",
        ("tests/mutants/test_readers.py",),
    ),
    Part(
        "breadth",
        "healthy guests of many configurations",
        ("tests/collect/test_breadth.py",),
    ),
    Part(
        "steps",
        "guests that are stopped at one instruction of a charge after the other",
        ("tests/collect/test_steps.py",),
    ),
    Part(
        "arm64-kernels",
        "build kernels for arm64: pages of 64 KiB, tagged pointers",
        kernels=(*_built_here(arch="arm64"), *kernels.names_of_part("tags")),
    ),
    Part("arm64-matrix", "audits on arm64 kernels", _MATRIX, arch="arm64"),
    Part("arm64-rest", "all other tests of kernels on arm64", ("tests",), arch="arm64"),
    Part("s390x", "audits on Debian's s390x kernels", _AUDITS, arch="s390x"),
    Part("ppc64el", "audits on Debian's ppc64el kernels", _AUDITS, arch="ppc64el"),
    Part("museum", "bugs that Linux really had, put back into its kernel", ("tests/museum",)),
    Part("seeds", "kernels whose cost is measured, and the kernel's own tests", ("tests/seeds",)),
    Part("gate", "the gate for kernels, honest and with a mistake", ("tests/lab/test_gate.py",)),
    Part("bench", "speed and memory, compared with a baseline", ("tests/lab/test_bench.py",)),
    Part(
        "crashes",
        "real crashes of Debian, saved by its kdump-tools",
        ("tests/crash/test_kdump_tools.py",),
    ),
    Part("fuzz", "thousands of commands on damaged images", ("tests/fuzz",)),
)


def part_named(name: str) -> Part:
    """Return the part of this name."""
    for part in PARTS:
        if part.name == name:
            return part
    raise LabError(f"no part {name!r}; there are: {', '.join(part.name for part in PARTS)}")


def arguments(part: Part) -> list[str]:
    """Return pytest's arguments for the tests of a part."""
    ignored = [
        path
        for other in PARTS
        for path in other.paths
        if other.arch == part.arch
        and path not in part.paths
        and any(path.startswith(f"{own}/") for own in part.paths)
    ]
    return ["--all", *part.paths, *(f"--ignore={path}" for path in ignored)]


class Results:
    """The last results of all parts at one commit.

    :param commit: None if there are changes that are not committed; then nothing is kept
    """

    def __init__(self, commit: str | None) -> None:
        self._path = None if commit is None else cache_folder("tests") / f"{commit}.json"
        self._found: dict[str, dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            self._found = json.loads(self._path.read_bytes())

    def passed(self, part: Part) -> bool:
        """Return whether the last run of a part passed."""
        return bool(self._found.get(part.name, {}).get("passed"))

    def keep(self, part: Part, passed: bool, seconds: float) -> None:
        """Keep the result of a part."""
        ended = time.strftime("%Y-%m-%d %H:%M")
        self._found[part.name] = {"passed": passed, "seconds": round(seconds), "ended": ended}
        if self._path is not None:
            write_atomically(self._path, json.dumps(self._found, indent=1).encode() + b"\n")

    def told(self, part: Part) -> str:
        """Return the last result of a part in words."""
        if part.name not in self._found:
            return "not run"
        last = self._found[part.name]
        minutes = -(-last["seconds"] // 60)
        return f"{'passed' if last['passed'] else 'failed'}, {minutes} min, {last['ended']}"


def commit() -> str | None:
    """Return the commit of this working tree; None if it has changes, or is no git tree."""
    git = ["git", "-C", str(PROJECT)]
    done = [
        subprocess.run([*git, *words], capture_output=True, text=True, check=False)
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    ]
    if any(one.returncode for one in done) or done[1].stdout:
        return None
    return done[0].stdout.strip()


def build(names: Sequence[str]) -> None:
    """Build kernels that are not in the cache."""
    for name in names:
        kernels.kernel(name)


def run_part(part: Part) -> bool:
    """Run one part; return whether it passed."""
    if part.kernels:
        try:
            build(part.kernels)
        except LabError as error:
            print(f"test: {error}", file=sys.stderr)
            return False
        return True
    environment = {**os.environ, "LAB_ARCH": part.arch}
    command = [*_PYTEST, *arguments(part)]
    return subprocess.run(command, cwd=PROJECT, env=environment, check=False).returncode == 0


def run_parts(
    parts: Sequence[Part],
    results: Results,
    *,
    again: bool,
    run: Callable[[Part], bool] = run_part,
) -> Iterator[str]:
    """Run parts in order, and yield what to say of each. Stop where kernels cannot be built."""
    failed = []
    for part in parts:
        if results.passed(part) and not again:
            yield f"part {part.name}: {results.told(part)}; --again repeats it"
            continue
        yield f"part {part.name}: {part.what}"
        began = time.monotonic()
        passed = run(part)
        results.keep(part, passed, time.monotonic() - began)
        yield f"part {part.name}: {results.told(part)}"
        if not passed:
            failed.append(part.name)
            if part.kernels:
                break
    if failed:
        raise FailedError(f"failed: {', '.join(failed)}")
    yield f"{len(parts)} parts passed"


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="test", usage="\n" + _USAGE, allow_abbrev=False, add_help=False
    )
    for name in ("--all", "--again", "--parts", "--soak", "--help"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--part", metavar="NAME")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the tests that the arguments of `scripts/test` choose; return the exit status."""
    args, rest = _parsed(argv)
    if args.help:
        print(f"{_USAGE}\n\nPytest's own options: .venv/bin/python -m pytest --help")
        return 0
    if (args.part or args.again) and (rest or not args.all):
        raise LabError("--part and --again go with --all and nothing else")
    at = commit() if args.all or args.parts else None
    results = Results(at)
    if at is None and (args.parts or (args.all and not rest)):
        print("test: not everything is committed, so results are not kept", file=sys.stderr)
    if args.parts:
        for part in PARTS:
            print(f"{part.name:14}{results.told(part):36}{part.what}")
        return 0
    if not args.all or rest or args.soak:
        _pytest(args, rest)
    parts = [part_named(args.part)] if args.part else PARTS
    for line in run_parts(parts, results, again=args.again):
        print(f"test: {line}", flush=True)
    return 0


def fetch_others() -> None:
    """Fetch kernels of other architectures, as far as Debian's mirrors have them now."""
    for name in kernels.OF_OTHERS:
        try:
            kernels.kernel(name)
        except LabError as error:
            print(f"test: {name} is not tested: {str(error).splitlines()[0]}", file=sys.stderr)


def _pytest(args: argparse.Namespace, rest: list[str]) -> NoReturn:
    """Become pytest, so that its closing line is the last one."""
    if not args.soak:
        fetch_others()
    if args.all:
        build(_built_here() + _built_here(broken=True))
        rest.insert(0, "--all")
    if args.soak:
        build(["7.3-pernode-debug"])
        rest.insert(0, "--soak")
    os.chdir(PROJECT)
    os.execv(_PYTEST[0], [*_PYTEST, *rest])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        print(f"test: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FailedError) else 2)
    except KeyboardInterrupt:
        print("test: interrupted", file=sys.stderr)
        sys.exit(130)
