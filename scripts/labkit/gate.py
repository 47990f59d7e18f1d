# SPDX-License-Identifier: LGPL-2.1-or-later
"""Test the memcg accounting of a kernel: boot it in many ways, audit each image, print KTAP."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import dump, kmodules, machine, selftest
from .errors import BootError, GuestError, LabError
from .images import unless_stale
from .kernels import Kernel
from .machine import Options
from .paths import PROJECT, cache_folder
from .store import locked

#: What the kernel says of itself. Stalls and lockups are the fault of a slow emulator.
_COMPLAINT = re.compile(
    r"WARNING:| BUG:? (?!soft lockup|workqueue lockup|MAX_)|kernel BUG at |\bOops: "
    r"|general protection fault|Kernel panic - not syncing: (?!sysrq triggered crash)|UBSAN: "
    r"|_(?:add|del) corruption|suspicious RCU|refcount_t: |underflow"
)
_SYSRQ = "sysrq triggered crash"
#: How many diagnoses, findings without a diagnosis, complaints, memcgs, and examples of what was
#: not read are printed of a test, and how many lines of a text.
_MOST_DIAGNOSES = 10
_MOST_FINDINGS = 5
_MOST_COMPLAINTS = 10
_MOST_PATHS = 3
_UNREADABLE = 3
_MOST_LINES = 80
#: How often a busy guest is stopped until nothing is half done that cannot be verified, and how far
#: the seeds are apart.
_MOST_MOMENTS = 3
_NEXT_MOMENT = 100
#: Seconds that an audit may take.
_PATIENCE = 600
#: Options of the kernel that a workload, a freeze, or the module needs.
_NEEDS = {
    "mixed": ("CONFIG_ZSWAP", "CONFIG_BPF_SYSCALL", "CONFIG_INET"),
    "loaded": ("CONFIG_ZSWAP", "CONFIG_BPF_SYSCALL", "CONFIG_INET"),
    "interleave": ("CONFIG_CPUSETS",),
    "repopulated": ("CONFIG_CPUSETS",),
    "straddle": ("CONFIG_ZSWAP",),
    "zswap": ("CONFIG_ZSWAP",),
    "panic": (
        "CONFIG_KEXEC_FILE",
        "CONFIG_CRASH_DUMP",
        "CONFIG_PROC_VMCORE",
        "CONFIG_MAGIC_SYSRQ",
    ),
    "pernode_selftest": ("CONFIG_MODULES", "CONFIG_DEBUG_FS", "CONFIG_CPUSETS"),
}
#: Options that rule them out: the lab signs nothing.
_RULED_OUT = {
    "panic": ("CONFIG_KEXEC_SIG_FORCE",),
    "pernode_selftest": ("CONFIG_MODULE_SIG_FORCE",),
}
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\t]")
_HALF = "half"


class Case(NamedTuple):
    """
    One guest, and the audit of its image.

    :ivar nodes: as for ``--nodes``
    :ivar workload: as for ``--workload``; ``idle`` with a stage
    :ivar freeze: ``settled``, ``busy`` or ``panic``
    :ivar seed: of the moment at which a busy guest is stopped
    :ivar stage: what the module ``pernode_selftest`` has done, if it is loaded
    """

    nodes: str
    workload: str
    freeze: str = "settled"
    seed: int | None = None
    stage: str = ""

    @property
    def name(self) -> str:
        """The name of the test, as it is printed."""
        what = f"{selftest.MODULE.name}:{self.stage}" if self.stage else self.workload
        moment = self.freeze if self.seed is None else f"{self.freeze}:{self.seed}"
        return f"nodes={self.nodes} {what} {moment}"

    def obstacle(self, kernel: Kernel) -> str:
        """Return why a kernel cannot run the test; empty if it can."""
        names = [self.workload, self.freeze, *([selftest.MODULE.name] if self.stage else ())]
        lacks = [
            option
            for name in names
            for option in _NEEDS.get(name, ())
            if kernel.config.get(option) not in ("y", "m")
        ]
        if lacks:
            return f"the kernel has no {', '.join(lacks)}"
        has = [o for name in names for o in _RULED_OUT.get(name, ()) if kernel.config.get(o) == "y"]
        if has:
            return f"the kernel has {', '.join(has)}"
        if self.stage and kernel.module_command is None:
            return "modules cannot be built without a build tree"
        return ""


_MEMORY_ONLY = "2cpu+6mem"
MATRIX = (
    *(Case(nodes, "mixed") for nodes in ("1", "2", "4", _MEMORY_ONLY)),
    *(
        Case(_MEMORY_ONLY, workload)
        for workload in ("interleave", "repopulated", "straddle", "zswap")
    ),
    *(Case("4", "idle", stage=stage) for stage in (_HALF, "removed")),
    *(Case(_MEMORY_ONLY, "idle", stage=stage) for stage in (_HALF, "cpuless", "removed")),
    *(Case(nodes, "loaded", "busy", 1) for nodes in ("1", "4", _MEMORY_ONLY)),
    Case("2", "loaded", "busy", 2),
    *(Case(nodes, "mixed", "panic") for nodes in ("1", "4")),
)


@dataclass
class Result:
    """
    What became of a test.

    :ivar passed: ``None`` if the test could not be run
    :ivar told: lines that explain it
    :ivar skipped: why it was not run; empty if it was
    :ivar not_kept: why this kernel does not support an identity, by its name
    :ivar undecided: whether nothing wrong was found, and something could not be verified
    """

    passed: bool | None
    told: list[str] = field(default_factory=list)
    skipped: str = ""
    not_kept: dict[str, str] = field(default_factory=dict)
    undecided: bool = False


def chosen(patterns: Sequence[str]) -> list[Case]:
    """Return the tests whose names match one of some shell patterns; all, if there are none."""
    if not patterns:
        return list(MATRIX)
    tests = [t for t in MATRIX if any(fnmatchcase(t.name, pattern) for pattern in patterns)]
    if not tests:
        raise LabError(f"--only: no test matches {' or '.join(patterns)}; --list lists the tests")
    return tests


def gate(kernel: Kernel, tests: Sequence[Case]) -> int:
    """
    Run tests, and print KTAP.

    :return: exit status: 0 if all passed or were skipped, 1 if one failed, 2 if one could not be
        run, none was, or the kernel does not boot
    """
    with locked(f"gate-{kernel.name}"):
        kept = cache_folder("gate") / kernel.name
        shutil.rmtree(kept, ignore_errors=True)
        if any(test.stage and not test.obstacle(kernel) for test in tests):
            # The build tree may change meanwhile. The tests say what is wrong with it.
            with suppress(LabError):
                kmodules.build_module(kernel, selftest.MODULE)
        head = f"# kernel: {kernel.release}, {kernel.tree or kernel.folder}"
        print("KTAP version 1", head, f"1..{len(tests)}", sep="\n", flush=True)
        results: list[Result] = []
        for number, test in enumerate(tests, 1):
            result = _result(kernel, test, kept / f"{number:02}", results)
            results.append(result)
            print(*_ktap(number, test, result), sep="\n", flush=True)
        return _summary(results)


class _NoBoot(Result):
    """The first guest did not boot."""


def _result(kernel: Kernel, test: Case, folder: Path, before: Sequence[Result]) -> Result:
    """Run one test, unless no guest can be expected to boot."""
    if any(isinstance(result, _NoBoot) for result in before):
        return Result(True, skipped="the kernel does not boot")
    try:
        return run(kernel, test, folder)
    except BootError as error:
        # Others may boot: on other nodes, say.
        has_booted = any(not result.skipped for result in before)
        return (Result if has_booted else _NoBoot)(False, [str(error)])


def _summary(results: Sequence[Result]) -> int:
    """Print what became of all tests; return the exit status."""
    for name, why in sorted({pair for r in results for pair in r.not_kept.items()}):
        print(f"# not compared: {name}: {why}")
    failed = sum(result.passed is False for result in results)
    broken = sum(result.passed is None for result in results)
    skipped = sum(bool(result.skipped) for result in results)
    passed = len(results) - failed - broken - skipped
    print(f"# {passed} passed, {failed} failed, {skipped} skipped, {broken} could not be run")
    if any(isinstance(result, _NoBoot) for result in results) or not (passed or failed):
        return 2
    return 1 if failed else 2 if broken else 0


def _ktap(number: int, test: Case, result: Result) -> Iterator[str]:
    """Return the lines about a test. Those that explain a failure are before its result."""
    for text in result.told:
        lines = [_UNPRINTABLE.sub("?", line) for line in text.splitlines()]
        yield from (f"# {line}" for line in lines[:_MOST_LINES])
        if len(lines) > _MOST_LINES:
            yield f"# ({len(lines) - _MOST_LINES} other lines)"
    word = "ok" if result.passed else "not ok"
    directive = f" # SKIP {result.skipped}" if result.skipped else ""
    if result.passed is None:
        directive = " # ERROR could not be run"
    yield f"{word} {number} - {test.name}{directive}"


def run(kernel: Kernel, test: Case, folder: Path) -> Result:
    """
    Run one test. Its image stays in a folder unless the test passes.

    :raises BootError: if the guest does not boot
    """
    obstacle = test.obstacle(kernel)
    if obstacle:
        return Result(True, skipped=obstacle)
    core = folder / "vmcore"
    try:
        doubts: list[str] = []
        for moment in moments(test):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            unless_stale(partial(_image, kernel, moment, core))
            result = judged(kernel, test, core)
            result.told[:0] = doubts
            if not result.undecided:
                break
            doubts = [*result.told, f"not decided: {moment.name}"]
    except BootError:
        raise
    except GuestError as error:
        result = Result(False, [str(error)])
    except (LabError, OSError, subprocess.SubprocessError) as error:
        result = Result(None, [str(error)])
    if core.exists() and not result.passed:
        result.told.append(f"image: {core}")
    else:
        shutil.rmtree(folder)
    return result


def moments(test: Case) -> list[Case]:
    """
    Return a test with the moments at which its guest is stopped, until an audit can decide.

    A guest that never rests may be stopped while a task is between two steps of a charge, and
    nothing shows the amount.
    """
    if test.seed is None:
        return [test]
    return [test._replace(seed=test.seed + _NEXT_MOMENT * n) for n in range(_MOST_MOMENTS)]


def _image(kernel: Kernel, test: Case, core: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gate.") as name:
        more: dict[str, Any] = {}
        if test.stage:
            script = selftest.script(Path(name), test.stage)
            more = {"modules": ((str(selftest.MODULE), ""),), "run": str(script)}
        options = Options(kernel.name, test.nodes, workload=test.workload, **more)
        machine.check(options)
        dump.dump(options, dump.Image(test.freeze, seed=test.seed), core)


def judged(kernel: Kernel, test: Case, core: Path) -> Result:
    """
    Audit the image of a test, and look at what the guest said.

    :raises LabError: if the image cannot be audited
    """
    told = [f"console: {line}" for line in complaints(core)]
    if test.freeze == "panic" and _SYSRQ not in _console(core):
        told.append("console: the kernel crashed before it was asked to")
    report = _asked(kernel, core, "audit")
    said = verdict(report)
    told += said
    if test.stage == _HALF:
        told += _misses(kernel, core, report)
    not_kept = {i["name"]: i["reason"] for i in report["identities"] if i["status"] == "not-kept"}
    # The verdict says so, and why; everything else that is told is a fault.
    undecided = _is_undecided(report) and told == said
    return Result(not told, told, not_kept=not_kept, undecided=undecided)


def _console(core: Path) -> str:
    return (dump.beside(core) / "console").read_text(errors="replace").replace("\r", "")


def complaints(core: Path) -> list[str]:
    """Return what the kernel of an image complained about on its console."""
    lines = _console(core).splitlines()
    return [line for line in lines if _COMPLAINT.search(line)][:_MOST_COMPLAINTS]


def _asked(kernel: Kernel, core: Path, *words: str) -> dict[str, Any]:
    """Run a command of the package on an image, and return its JSON document."""
    command = [sys.executable, "-m", "memcg_inspect", *words, "-c", str(core), "--json"]
    if kernel.config.get("CONFIG_DEBUG_INFO_BTF") != "y":
        command += ["-s", str(kernel.vmlinux)]
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=_PATIENCE
    )
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        why = done.stderr.strip() or f"exit status {done.returncode}"
        raise LabError(f"the image cannot be audited: {why}") from None
    return document


def _is_undecided(report: dict[str, Any]) -> bool:
    """Return whether all could be read, and only rows keep an audit from being exact."""
    unread = any(coverage["unreadable"] for coverage in report["coverage"].values())
    return report["verdict"] == "incomplete" and not report["findings"] and not unread


def verdict(report: dict[str, Any]) -> list[str]:
    """Return what an audit found, in lines; none if it is exact."""
    if report["verdict"] == "exact":
        return []
    said = [f"audit: {report['verdict']}, {len(report['findings'])} findings"]
    for cause in report["diagnoses"][:_MOST_DIAGNOSES]:
        said.append(f"{cause['confidence']}: {cause['what']}{_of(cause['memcg_paths'])}")
        if cause["functions"]:
            said.append(f"  look at {', '.join(cause['functions'])}")
    if len(report["diagnoses"]) > _MOST_DIAGNOSES:
        said.append(f"{len(report['diagnoses']) - _MOST_DIAGNOSES} other diagnoses")
    unexplained = [report["findings"][index] for index in report["unexplained"]]
    for finding in unexplained[:_MOST_FINDINGS]:
        said.append(f"{_place(finding, finding['memcg_path'])}: {finding['what']}")
    if len(unexplained) > _MOST_FINDINGS:
        said.append(f"{len(unexplained) - _MOST_FINDINGS} other findings have no diagnosis")
    paths = {memcg["address"]: memcg["path"] for memcg in report["memcgs"]}
    doubtful = [row for row in report["rows"] if row["status"] == "unverifiable"]
    for row in doubtful[:_MOST_FINDINGS]:
        said.append(f"not verified: {_place(row, paths.get(row['memcg']))}: {row['reason']}")
    if len(doubtful) > _MOST_FINDINGS:
        said.append(f"{len(doubtful) - _MOST_FINDINGS} other rows could not be verified")
    for subject, coverage in report["coverage"].items():
        if coverage["unreadable"]:
            examples = [missed["what"] for missed in coverage["examples"][:_UNREADABLE]]
            said.append(f"not read: {subject}: {coverage['unreadable']}, such as {examples}")
    return said


def _place(row: dict[str, Any], path: str | None) -> str:
    """Return what a row, or a finding, is about."""
    node = "" if row["nid"] is None else f", node {row['nid']}"
    return f"{row['identity']} {row['item']}{node}{_of([path])}"


def _of(paths: Iterable[str | None]) -> str:
    known = sorted({path for path in paths if path})
    others = len(known) - _MOST_PATHS
    shown = ", ".join(known[:_MOST_PATHS]) + (f", {others} others" if others > 0 else "")
    return f" ({shown})" if known else ""


def _misses(kernel: Kernel, core: Path, report: dict[str, Any]) -> list[str]:
    """Compare what the module says it holds with what its memcg is charged for, by node."""
    held, charged = _held(core), _charged(kernel, core, report)
    if not held:
        return [f"{selftest.MODULE.name} holds nothing"]
    return [
        f"{kind} on node {nid}: the module holds {size}, its memcg is charged for {got}"
        for kind in held
        for nid in sorted(held[kind].keys() | charged[kind].keys())
        if (size := held[kind].get(nid, 0)) != (got := charged[kind].get(nid, 0))
    ]


def _held(core: Path) -> dict[str, Counter[int]]:
    """Return bytes, or objects of a cache, that the module holds."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for kind, size, nodes in selftest.held(core):
        for nid, amount in nodes.items():
            if kind == "slab":
                found["objects"][nid] += amount // size
            else:
                found["percpu bytes" if kind == "percpu" else "bytes of pages"][nid] += amount
    return found


def _charged(kernel: Kernel, core: Path, report: dict[str, Any]) -> dict[str, Counter[int]]:
    found: dict[str, Counter[int]] = defaultdict(Counter)
    paths = {memcg["path"]: memcg["address"] for memcg in report["memcgs"]}
    memcg = paths.get(selftest.MEMCG)
    if memcg is None:
        raise LabError(f"the image has no memcg {selftest.MEMCG}")
    for cell in report["skew"]:
        if (cell["memcg"], cell["kind"]) == (memcg, "kmem") and cell["backing_nid"] is not None:
            found["bytes of pages"][cell["backing_nid"]] += cell["bytes"]
    of_memcg = ("--memcg", selftest.MEMCG, "--by", "memcg,node")
    for row in _rows(_asked(kernel, core, "percpu", *of_memcg)):
        found["percpu bytes"][row["node"]] += row["bytes"]
    by_cache = (*of_memcg[:-1], "memcg,cache,node")
    for row in _rows(_asked(kernel, core, "slabinfo", *by_cache)):
        if row["cache"] == selftest.CACHE:
            found["objects"][row["node"]] += row["objects"]
    return found


def _rows(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the rows of the first table of a document."""
    rows: Iterator[dict[str, Any]] = iter(document["tables"][0]["rows"])
    return rows
