# SPDX-License-Identifier: LGPL-2.1-or-later
"""`scripts/lab gate`: a kernel passes, a fault fails, and each failure is explained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labkit import gate, given, kernels, poke, selftest
from labkit.cli import main
from labkit.errors import BootError, GuestError, LabError
from labkit.gate import MATRIX, Case, Result
from support.guests import PERNODE_KERNELS, Lab
from support.mistakes import MISTAKES, name_of

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = ("CONFIG_MODULES", "CONFIG_DEBUG_FS", "CONFIG_CPUSETS")
ENOUGH = (
    *given._NEEDED,
    *("CONFIG_DEBUG_INFO_BTF", "CONFIG_ZSWAP", "CONFIG_BPF_SYSCALL", "CONFIG_INET"),
)
SOME = (Case("1", "mixed"), Case("2", "loaded", "busy", 7), Case("4", "idle", stage="half"))
Made = Callable[..., kernels.Kernel]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a function that makes a kernel of nothing but a configuration."""
    monkeypatch.setenv("MEMCG_INSPECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_given", {})

    def make(*options: str, name: str = "made") -> kernels.Kernel:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "bzImage").write_bytes(b"kernel")
        (folder / "release").write_text("9.9.9-made\n")
        (folder / "config").write_text("".join(f"{option}=y\n" for option in options))
        kernel = kernels.Kernel(name, folder, {"release": "9.9.9-made", "packages": {}})
        kernels.give(kernel)
        return kernel

    return make


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# What is printed


def test_each_test_has_a_name_of_its_own() -> None:
    names = [test.name for test in MATRIX]
    assert len(set(names)) == len(names)
    assert not any("#" in name for name in names)  # KTAP: what follows is a directive


def test_tests_are_chosen_by_their_names() -> None:
    assert gate.chosen([]) == list(MATRIX)
    assert {test.nodes for test in gate.chosen(["nodes=4 *", "nodes=1 *"])} == {"1", "4"}
    with pytest.raises(LabError, match="no test matches nodes=3"):
        gate.chosen(["nodes=3"])


@pytest.mark.parametrize(
    ("results", "status", "lines"),
    [
        ([Result(True)] * 3, 0, "3 passed, 0 failed, 0 skipped, 0 could not be run"),
        (
            [Result(True), Result(True, skipped="no X"), Result(False, ["because"])],
            1,
            "1 passed, 1 failed, 1 skipped, 0 could not be run",
        ),
        (
            [Result(None, ["broken"]), Result(True), Result(True)],
            2,
            "2 passed, 0 failed, 0 skipped, 1 could not be run",
        ),
        (
            [Result(None), Result(False), Result(True)],
            1,
            "1 passed, 1 failed, 0 skipped, 1 could not be run",
        ),
    ],
)
def test_the_exit_status_and_the_sums(
    results: list[Result],
    status: int,
    lines: str,
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = list(results)
    monkeypatch.setattr(gate, "run", lambda *_: left.pop(0))
    assert gate.gate(made(), SOME) == status
    out = printed(capsys)
    assert (out[0], out[2]) == ("KTAP version 1", "1..3")
    assert out[1].startswith("# kernel: 9.9.9-made, /")
    assert out[-1] == f"# {lines}"
    said = [line for line in out if line.startswith(("ok ", "not ok "))]
    assert [line.startswith("ok ") for line in said] == [bool(r.passed) for r in results]


def test_a_failure_is_explained_before_its_result(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "run", lambda *_: Result(False, ["one\ntwo", "three"]))
    gate.gate(made(), SOME[1:2])
    assert printed(capsys)[3:-1] == [
        "# one",
        "# two",
        "# three",
        "not ok 1 - nodes=2 loaded busy:7",
    ]


def test_a_kernel_that_does_not_boot_is_tried_once(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> Result:
        raise BootError("no answer:\n  Kernel panic")

    monkeypatch.setattr(gate, "run", run)
    assert gate.gate(made(), SOME) == 2
    assert printed(capsys)[3:-1] == [
        "# no answer:",
        "#   Kernel panic",
        "not ok 1 - nodes=1 mixed settled",
        "ok 2 - nodes=2 loaded busy:7 # SKIP the kernel does not boot",
        "ok 3 - nodes=4 pernode_selftest:half settled # SKIP the kernel does not boot",
    ]


def test_a_kernel_that_does_not_boot_with_some_nodes_fails(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what the topologies are for: the others are tested."""

    def run(_: object, test: Case, folder: Path) -> Result:
        if test.nodes == "2":
            raise BootError("no answer")
        return Result(True)

    monkeypatch.setattr(gate, "run", run)
    assert gate.gate(made(), SOME) == 1
    said = [line[:8] for line in printed(capsys) if line.startswith(("ok", "not ok"))]
    assert said == ["ok 1 - n", "not ok 2", "ok 3 - n"]


def test_nothing_that_can_be_tested_is_no_success(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate.gate(made(), SOME[:1]) == 2
    assert printed(capsys)[-1] == "# 0 passed, 0 failed, 1 skipped, 0 could not be run"


@pytest.mark.parametrize(
    ("error", "passed"),
    [(GuestError("panic"), False), (LabError("no QEMU"), None), (OSError("disk full"), None)],
)
def test_what_goes_wrong_is_told_and_the_others_go_on(
    error: Exception, passed: bool | None, made: Made, tmp_path: Path, monkeypatch: Any
) -> None:
    def image(*_: object) -> None:
        raise error

    monkeypatch.setattr(gate, "_image", image)
    result = gate.run(made(*ENOUGH), SOME[0], tmp_path / "1")
    assert result == Result(passed, [str(error)])
    assert not (tmp_path / "1").exists()


def test_lines_are_printable_and_not_too_many(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "run", lambda *_: Result(None, ["\x1b[2J\n" * 500]))
    assert gate.gate(made(), SOME[:1]) == 2
    out = printed(capsys)
    assert out[3] == "# ?[2J"
    assert out[-3:-1] == [
        "# (420 other lines)",
        f"not ok 1 - {SOME[0].name} # ERROR could not be run",
    ]
    assert len(out) < 90


def test_what_a_kernel_lacks_is_skipped(made: Made, tmp_path: Path) -> None:
    bare = made("CONFIG_ZSWAP", "CONFIG_INET", "CONFIG_MODULE_SIG_FORCE")
    result = gate.run(bare, SOME[0], tmp_path / "1")
    assert (result.passed, result.skipped) == (True, "the kernel has no CONFIG_BPF_SYSCALL")
    assert "CONFIG_KEXEC_FILE" in Case("1", "idle", "panic").obstacle(bare)
    module = made(*MODULES, "CONFIG_MODULE_SIG_FORCE", name="signed")
    assert SOME[2].obstacle(module) == "the kernel has CONFIG_MODULE_SIG_FORCE"


def test_identities_that_a_kernel_does_not_keep_are_told(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result(True, not_kept={"percpu": "this kernel has no MEMCG_PERCPU_B"})
    monkeypatch.setattr(gate, "run", lambda *_: result)
    assert gate.gate(made(), SOME) == 0
    assert printed(capsys)[-2] == "# not compared: percpu: this kernel has no MEMCG_PERCPU_B"


def test_complaints_of_the_kernel(tmp_path: Path) -> None:
    core = tmp_path / "vmcore"
    told = gate.dump.beside(core)
    told.mkdir()
    complaints = [
        "[    1.0] WARNING: CPU: 0 PID: 1 at mm/memcontrol.c:1 f+0x1/0x2",
        "[    1.0] BUG: unable to handle page fault",
        "[    1.0] kernel BUG at mm/page_counter.c:60!",
        "[    1.0] Oops: general protection fault, 0000 [#1]",
        "[    1.0] Kernel panic - not syncing: Fatal exception",
        "[    1.0] BUG kmalloc-64 (Not tainted): Poison overwritten",
        "[    1.0] list_del corruption. prev->next should be 1",
        "[    1.0] WARNING: suspicious RCU usage",
    ]
    others = [
        "[    1.0] watchdog: BUG: soft lockup - CPU#1 stuck for 22s!",
        "[    1.0] BUG: workqueue lockup - pool cpus=0",
        "[    1.0] rcu: INFO: rcu_sched self-detected stall on CPU",
        "[    1.0] Kernel panic - not syncing: sysrq triggered crash",
    ]
    (told / "console").write_text("\r\n".join(complaints + others))
    assert gate.complaints(core) == complaints


# External kernels


def test_what_is_no_kernel(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="has no kernel: neither arch/x86/boot/bzImage"):
        given.from_folder(tmp_path)
    with pytest.raises(LabError, match="no source of a kernel"):
        given.from_source(tmp_path)
    (tmp_path / "arch/x86/boot").mkdir(parents=True)
    (tmp_path / "arch/x86/boot/bzImage").touch()
    with pytest.raises(LabError, match="no vmlinux: run `make vmlinux bzImage modules`"):
        given.from_folder(tmp_path)
    (tmp_path / "vmlinux").touch()
    os.utime(tmp_path / "arch/x86/boot/bzImage", (1, 1))
    with pytest.raises(LabError, match="vmlinux is newer than arch/x86/boot/bzImage"):
        given.from_folder(tmp_path)
    (tmp_path / "Kconfig").touch()
    (tmp_path / ".config").touch()
    with pytest.raises(LabError, match="was built in place"):
        given.from_source(tmp_path)


def test_a_kernel_that_the_lab_cannot_use(made: Made) -> None:
    with pytest.raises(LabError, match=r"9\.9\.9-made has no .*CONFIG_NUMA.*CONFIG_VIRTIO_PCI"):
        given.from_folder(made("CONFIG_MEMCG").folder)
    with pytest.raises(LabError, match="has no types: neither CONFIG_DEBUG_INFO_BTF nor a vmlinux"):
        given.from_folder(made(*given._NEEDED, "CONFIG_DEBUG_INFO", name="stripped").folder)


def test_a_kernel_that_was_built_again_is_another_one(
    made: Made,
) -> None:
    """Whatever is written in place: the folder's files are no links of the cache."""
    folder = made(*ENOUGH).folder
    (folder / "of-no-concern").touch()
    first = given.from_folder(folder)
    assert not (first.folder / "of-no-concern").exists()
    (folder / "bzImage").write_bytes(b"another kernel")
    assert first.bzimage.read_bytes() == b"kernel"
    second = given.from_folder(folder)
    assert second.bzimage.read_bytes() == b"another kernel"
    (folder / "modules").mkdir()
    (folder / "modules" / "virtio_blk.ko").touch()
    third = given.from_folder(folder)
    assert len({kernel.facts["inputs"] for kernel in (first, second, third)}) == 3
    assert (third.folder / "modules" / "virtio_blk.ko").exists()


def test_a_configuration_of_odd_bytes(made: Made) -> None:
    kernel = made()
    (kernel.folder / "config").write_bytes(b'CONFIG_A=y\nCONFIG_B\n# \xe9\nCONFIG_C="\xe9"\n')
    assert kernel.config["CONFIG_A"] == "y" and "CONFIG_B" not in kernel.config


def test_copies_of_kernels_are_bounded(made: Made) -> None:
    ready = [
        given.from_folder(made(*ENOUGH, f"CONFIG_OF_{i}", name=f"made-{i}").folder)
        for i in range(6)
    ]
    assert [one.folder.exists() for one in ready] == [False] * 2 + [True] * 4
    last = ready[-1]
    assert kernels.kernel(last.name) is last and last.release == "9.9.9-made"
    assert kernels.tools(last.name) == () and last.module_command is None


def test_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--list", "--only", "*panic"]) == 0
    assert printed(capsys) == [test.name for test in MATRIX if test.freeze == "panic"]
    assert main(["gate"]) == 2
    assert "give --kernel-dir, --source or --kernel" in capsys.readouterr().err


BUSY = SOME[1]


@pytest.mark.parametrize(
    ("test", "undecided", "seeds"),
    [
        (BUSY, [False], [7]),
        (BUSY, [True, False], [7, 107]),
        (BUSY, [True, True, True], [7, 107, 207]),
        (SOME[0], [True], [None]),
    ],
)
def test_a_busy_guest_is_stopped_again_until_nothing_is_in_doubt(
    test: Case,
    undecided: list[bool],
    seeds: list[int | None],
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int | None] = []

    def image(_: object, moment: Case, core: Path) -> None:
        assert not core.exists()
        core.write_bytes(b"")
        taken.append(moment.seed)

    def judged(*_: object) -> Result:
        doubt = undecided[len(taken) - 1]
        return Result(not doubt, ["audit: incomplete"] if doubt else [], undecided=doubt)

    monkeypatch.setattr(gate, "_image", image)
    monkeypatch.setattr(gate, "judged", judged)
    monkeypatch.setattr(Case, "obstacle", lambda *_: "")
    result = gate.run(made(), test, tmp_path / "1")
    assert (taken, result.passed) == (seeds, not undecided[-1])
    said = [line for line in result.told if line.startswith("not decided: ")]
    assert [line.rpartition(":")[2] for line in said] == [str(seed) for seed in seeds[:-1]]
    assert (tmp_path / "1" / "vmcore").exists() is undecided[-1]


def report(**changes: Any) -> dict[str, Any]:
    row = {"identity": "slab", "item": "NR_X", "nid": 1, "memcg": 5, "reason": "why"}
    return {
        "verdict": "incomplete",
        "findings": [],
        "unexplained": [],
        "diagnoses": [],
        "coverage": {"slab": {"unreadable": 0, "examples": []}},
        "rows": [{**row, "status": "unverifiable"}, {**row, "status": "exact"}],
        "memcgs": [{"address": 5, "path": "/a"}],
        "identities": [],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "console", "undecided"),
    [
        ({}, [], True),
        ({}, ["BUG: x"], False),
        ({"verdict": "exact"}, [], False),
        ({"findings": [{}]}, [], False),
        ({"coverage": {"slab": {"unreadable": 1, "examples": []}}}, [], False),
    ],
)
def test_only_rows_leave_it_in_doubt(
    changes: dict[str, Any],
    console: list[str],
    undecided: bool,
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "complaints", lambda _: console)
    monkeypatch.setattr(gate, "_asked", lambda *_: report(**changes))
    result = gate.judged(made(), BUSY, tmp_path / "vmcore")
    assert result.undecided is undecided
    if not changes:
        assert result.told[-1] == "not verified: slab NR_X, node 1 (/a): why"


# On real kernels


@pytest.mark.image
def test_a_kernel_passes(tmp_path: Path) -> None:
    kernel = kernels.kernel("7.3")
    assert given.from_folder(kernel.folder) == kernel
    result = gate.run(kernel, Case("1", "mixed"), tmp_path / "1")
    assert (result.passed, result.told, result.skipped) == (True, [], "")
    assert not (tmp_path / "1").exists()  # an image that nobody needs


def copied(core: Path, folder: Path) -> Path:
    """Return a copy of an image's directory beside a path for the image itself."""
    out = folder / "vmcore"
    shutil.copytree(gate.dump.beside(core), gate.dump.beside(out), symlinks=True)
    return out


@pytest.mark.image
def test_a_fault_fails_and_is_diagnosed(lab: Lab, tmp_path: Path) -> None:
    image = lab.image("7.3", "1", "mixed")
    core = copied(image.core, tmp_path)
    shutil.copy(image.core, core)
    assert gate.judged(kernels.kernel("7.3"), Case("1", "mixed"), core).told == []
    crashed = gate.judged(kernels.kernel("7.3"), Case("1", "mixed", "panic"), core)
    assert crashed.told == ["console: the kernel crashed before it was asked to"]
    counter = (
        "root_mem_cgroup.nodeinfo[0].lruvec_stats"
        ".state[mem_cgroup_stats_index[NR_SLAB_RECLAIMABLE_B]]"
    )
    poke.poke(image.core, core, image.vmlinux, [(counter, "old + 64")])
    result = gate.judged(kernels.kernel("7.3"), Case("1", "mixed"), core)
    assert result.passed is False
    assert result.told[0].startswith("audit: findings, ")
    assert any("64 bytes" in line for line in result.told), result.told


@pytest.mark.image
@pytest.mark.parametrize("kernel", PERNODE_KERNELS)
def test_what_the_module_holds_is_compared(kernel: str, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    original = selftest.selftest(tmp_path, kernel, "half")
    core = copied(original, tmp_path / "image")
    core.symlink_to(original)
    ready, test = kernels.kernel(kernel), Case("2cpu+6mem", "idle", stage="half")
    assert gate.judged(ready, test, core).told == []
    held = gate.dump.beside(core) / "2" / selftest.FOLDER.lstrip("/") / "held"
    lines = held.read_text().splitlines()
    one = next(number for number, line in enumerate(lines) if line.split()[1] == "slab")
    held.write_text("\n".join(lines[:one] + lines[one + 1 :]))
    (told,) = gate.judged(ready, test, core).told
    assert told.startswith("objects on node ") and "its memcg is charged for" in told
    held.write_text("")
    assert gate.judged(ready, test, core).told == ["pernode_selftest holds nothing"]


@pytest.mark.image
@pytest.mark.long
@pytest.mark.parametrize("kernel", ["7.3-lab", "7.3-pernode"])
def test_an_honest_kernel_passes_the_whole_gate(kernel: str) -> None:
    command = [sys.executable, ROOT / "scripts" / "lab", "gate", "--kernel", kernel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"# {len(MATRIX)} passed, 0 failed, 0 skipped" in done.stdout


@pytest.mark.image
@pytest.mark.long
@pytest.mark.parametrize("mistake", kernels.BROKEN)
def test_each_broken_kernel_fails(mistake: str, tmp_path: Path) -> None:
    test = Case("2cpu+6mem", MISTAKES[mistake].workload)
    assert test in MATRIX
    result = gate.run(kernels.kernel(name_of(mistake)), test, tmp_path / "1")
    assert result.passed is False
    assert result.told[-1] == f"image: {tmp_path / '1' / 'vmcore'}"
