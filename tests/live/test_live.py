# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Kernels that run while they are audited: under load, with a fault, and paused.

``scripts/test --all --part live`` makes two hundred audits under load.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.guests import BUILT_KERNELS, DEBIAN_KERNELS, KERNELS, ROOT, kernels
from support.live_guest import execute, from_inside, from_outside, kept
from support.terminals import read_terminal

from memcg_inspect.checks.samples import SAMPLES
from memcg_inspect.collect.ticks import STANDS_STILL
from memcg_inspect.image.image import Image
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.image.qmp import Monitor
from memcg_inspect.linux.kernel.stacktrace_refs import stack_refs
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image

NEWEST = DEBIAN_KERNELS[-1]
LAB_KERNEL = ["7.3-lab"] if "7.3-lab" in BUILT_KERNELS else []
CHURN = ("--nodes", "4", "--workload", "churn", "--freeze", "none")
#: Pages of one block that the module makes forget who pays for it.
LOST = 4
#: Addresses that nothing points to.
NOWHERE = (0x5EED5EED5EED5EE1, 0x5EED5EED5EED5EE3)


def check_found_nothing(audited: dict[str, Any], source: str) -> int:
    """No finding, no traceback; return how many rows were marked as moving."""
    report = audited["report"]
    assert report is not None, audited["said"]
    assert "Traceback" not in audited["said"]
    names = {memcg["address"]: memcg["path"] for memcg in report["memcgs"]}
    found = [
        (f["identity"], names.get(f["memcg"]), f["nid"], f["item"], f["difference"])
        for f in report["findings"]
    ]
    rows = [row for row in report["rows"] if row["status"] == "differs"]
    assert (found, rows) == ([], [])
    assert report["image"]["source"] == source
    ends = [(0, "exact"), (3, "moving")]
    unverifiable = [row["reason"] for row in report["rows"] if row["status"] == "unverifiable"]
    if report["looks"] == 1:  # a guest that stands still: a charge may be half done
        ends.append((3, "incomplete"))
        # Or a task that runs may hold a reference, or charge another memcg: its registers are not
        # known.
        known_reason = re.compile(
            r"\bmay\b|registers of its CPU are not in the image$|^half-done charge of "
        )
        assert all(map(known_reason.search, unverifiable)), unverifiable
    assert (audited["status"], report["verdict"]) in ends
    moving = [row for row in report["rows"] if row["status"] == "moving"]
    for row in moving:
        reason = row["reason"]
        assert f"{report['looks']} samples" in reason or "this program runs in" in reason
    known = {"exact", "in-flight", "moving", *(["unverifiable"] if report["looks"] == 1 else [])}
    assert {row["status"] for row in report["rows"]} <= known
    assert (audited["status"] == 3) == bool(moving or unverifiable)
    assert report["looks"] > 1 or not moving
    # it was not empty
    assert sum(row["status"] == "exact" for row in report["rows"]) > 50
    return len(moving)


#: CPUs that come and go, and a module that is loaded and unloaded, beside memcgs that do.
SCENE = str(ROOT / "fixtures" / "scenes" / "plug.sh")
PLUGGED = ("--nodes", "2", "--cpus", "4", "--workload", "churn", "--freeze", "none", "--run", SCENE)
#: Debian's kernels have a driver that can be unloaded.
MODULES = ("charge", "percpu_bench")
MANY = [k for k in (*DEBIAN_KERNELS, "7.3-lab") if k in KERNELS]


def plugged(kernel: str) -> list[str]:
    """Return the arguments for a guest whose CPUs and modules come and go."""
    words = list(PLUGGED)
    for name in MODULES if kernel in BUILT_KERNELS else ():
        words += ["--module", str(ROOT / "fixtures" / "modules" / name)]
    return words


def rounds(folder: Path) -> int:
    """Return how often a CPU and a module have come and gone."""
    lines = execute(folder, "cat /run/plugged").splitlines()
    # busybox says what failed to nobody: each round names what it did
    assert all(len(line.split()) == 2 for line in lines[:-1]), lines
    return len(lines)


def churned(folder: Path, kernel: str, audits: int) -> list[int]:
    """
    Return how many rows moved in each audit during which a CPU came or went.

    :param audits: number of such audits
    """
    seen: list[int] = []
    with kept(folder, kernel, *plugged(kernel)) as qmp:
        # An audit may be done before the next CPU goes.
        for _ in range(5 * audits):
            before = rounds(folder)
            moved = check_found_nothing(from_outside(qmp, "--wait", "0"), "qemu")
            if rounds(folder) > before:
                seen.append(moved)
            if len(seen) == audits:
                break
    return seen


def test_under_churn_from_outside(tmp_path: Path) -> None:
    """Memcgs, CPUs and modules come and go: ten audits find nothing."""
    seen = churned(tmp_path, NEWEST, 10)
    assert len(seen) == 10
    assert any(seen)


@pytest.mark.long
@pytest.mark.parametrize("kernel", MANY)
def test_under_churn_from_outside_for_long(tmp_path: Path, kernel: str) -> None:
    """Two hundred audits, on five kernels."""
    seen = churned(tmp_path, kernel, 40)
    assert len(seen) == 40
    assert any(seen)


#: Charges what a shell and its children need, again and again, until a file is gone.
BURST = "touch /run/burst; (while [ -e /run/burst ]; do cat /proc/mounts; done) >/dev/null 2>&1 &"


def test_a_machine_that_comes_to_rest(tmp_path: Path) -> None:
    """Rows that moved stand still in the end, and are exact then."""
    guest = ("--nodes", "2", "--workload", "files", "--freeze", "none")
    with kept(tmp_path, NEWEST, *guest) as qmp:
        execute(tmp_path, BURST)
        moved = (check_found_nothing(from_outside(qmp, "--wait", "0"), "qemu") for _ in range(5))
        assert any(moved)
        execute(tmp_path, "(sleep 6; rm /run/burst) >/dev/null 2>&1 &")
        assert check_found_nothing(from_outside(qmp, "--wait", "200"), "qemu") == 0


#: Few CPUs: they are emulated, and the audit runs on them, too.
SMALL = ("--nodes", "2", "--cpus", "2", "--memory", "384M", "--workload", "churn")


@pytest.mark.parametrize("kernel", LAB_KERNEL)
def test_under_churn_from_inside(kernel: str) -> None:
    audited, unprivileged = from_inside(kernel, 1, *SMALL)
    check_found_nothing(audited, "live")
    # Without the permission, one line says what to do.
    assert (unprivileged["status"], unprivileged["report"]) == (2, None)
    (line,) = unprivileged["said"].splitlines()
    assert "no permission to read /proc/kcore: run as root (sudo)" in line


@pytest.mark.long
@pytest.mark.parametrize("kernel", [NEWEST, *LAB_KERNEL])
def test_under_churn_from_inside_for_long(kernel: str) -> None:
    *audited, unprivileged = from_inside(kernel, 5, *SMALL)
    assert (len(audited), unprivileged["status"]) == (5, 2)
    for one in audited:
        check_found_nothing(one, "live")


def lose(folder: Path) -> None:
    """Have the module charge a block of pages to a memcg that rests, and forget who pays."""
    execute(
        folder,
        "set -e\ncd /sys/fs/cgroup\necho +memory >cgroup.subtree_control\nmkdir -p planted\n"
        "charge=/sys/kernel/debug/charge\n"
        "sh -c 'echo 0 >planted/cgroup.procs; echo pages 1 2 1 >'$charge/make\n"
        "id=$(tail -n 1 $charge/held | cut -d' ' -f1)\necho lose $id >$charge/make\n"
        # what the shell left behind is freed later: all of it has gone when nothing changes
        "said() { cat planted/memory.current; grep -E '^(slab|kernel) ' planted/memory.stat; }\n"
        "was=; same=0\nwhile [ $same -lt 4 ]; do\n sleep 0.5; now=$(said)\n"
        ' [ "$now" = "$was" ] && same=$((same + 1)) || same=0\n was=$now\ndone\n',
    )


def check_found_lost(audited: dict[str, Any], blocks: int) -> int:
    """Nothing but the lost blocks is found; return by how many pages the memcg is off."""
    report = audited["report"]
    assert (audited["status"], report["verdict"]) == (1, "findings")
    planted = {m["address"] for m in report["memcgs"] if m["path"] == "/planted"}
    others = [f["what"] for f in report["findings"] if f["memcg"] not in planted]
    assert not others
    found = {f["identity"]: f for f in report["findings"] if f["objcg"] is None}
    rows = [r for r in report["rows"] if r["identity"] == "kmem" and r["memcg"] in planted]
    assert "kmem" in found, rows
    assert found["kmem"]["item"] == "MEMCG_KMEM"
    # each block held a reference, to the obj_cgroup of the node that the task was on
    references = [f for f in report["findings"] if f["identity"] == "references"]
    assert sum(f["difference"] for f in references) == blocks
    return int(found["kmem"]["difference"])


def lost(folder: Path, kernel: str, runs: int) -> tuple[list[int], int]:
    """Return the pages that each audit misses in the memcg, and how often CPUs came and went."""
    with kept(folder, kernel, *plugged(kernel)) as qmp:
        found = []
        for run in range(runs):
            lose(folder)
            # On a slow machine, twelve samples may take more than the 30 seconds by default.
            audited = from_outside(qmp, "--wait", "100")
            found.append(check_found_lost(audited, run + 1))
        return found, rounds(folder)


@pytest.mark.parametrize("kernel", LAB_KERNEL)
def test_a_fault_is_found_in_the_churn(tmp_path: Path, kernel: str) -> None:
    found, went = lost(tmp_path, kernel, 2)
    assert found == [LOST, 2 * LOST]
    assert went > 2


@pytest.mark.long
@pytest.mark.parametrize("kernel", LAB_KERNEL)
def test_a_fault_is_found_in_the_churn_for_long(tmp_path: Path, kernel: str) -> None:
    found, went = lost(tmp_path, kernel, 20)
    assert found == [run * LOST for run in range(1, 21)]
    assert went > 20


@pytest.mark.parametrize("kernel", LAB_KERNEL)
def test_a_task_that_waits_in_the_middle_of_a_charge(tmp_path: Path, kernel: str) -> None:
    """It waits for longer than all samples take. What it charged is no finding; a fault is."""
    modules = [str(ROOT / "fixtures" / "modules" / name) for name in MODULES]
    words = ["--nodes", "2", "--cpus", "2", "--module", modules[0]]
    words += ["--module", f"{modules[1]}:endless=2816", "--freeze", "none"]
    words += ["--run", str(ROOT / "fixtures" / "scenes" / "percpu.sh")]
    with kept(tmp_path, kernel, *words) as qmp:
        lose(tmp_path)
        execute(tmp_path, "echo 1 >/sys/kernel/debug/percpu_hold")
        report = from_outside(qmp)["report"]
    assert report["looks"] >= SAMPLES
    path = {memcg["address"]: memcg["path"] for memcg in report["memcgs"]}
    assert {path[f["memcg"]] for f in report["findings"]} == {"/planted"}
    waits = [row for row in report["rows"] if row["status"] == "in-flight"]
    rows = {(row["identity"], path[row["memcg"]]) for row in waits}
    assert rows >= {(identity, "/percpu") for identity in ("kmem", "usage", "objcg_bytes")}
    for row in waits:
        assert re.search(r"2,816 bytes for each CPU by cat .* which was not running", row["reason"])


def is_running(folder: Path) -> bool:
    before = execute(folder, "cat /proc/uptime")
    time.sleep(0.1)
    return execute(folder, "cat /proc/uptime") != before


def check_registers_are_not_known(qmp: Path) -> None:
    """Whatever the address, a register of each CPU may contain it."""
    monitor = Monitor(str(qmp))
    source = ImageSource(qemu=str(qmp), qemu_descriptor=monitor.descriptor(), debuginfo="btf")
    prog = open_program(source)
    with monitor.paused():
        image, coverage = Image(prog), Coverage()
        # A guest that runs is read several times instead.
        assert not stack_refs(image, set(NOWHERE), coverage)
        image.stopped = True
        found = stack_refs(image, set(NOWHERE), coverage)
        assert (coverage.read > 4, coverage.unreadable) == (True, 0)
        first, second = map(found.get, NOWHERE)
        assert first == second
        # drgn can unwind a task that is being switched from.
        assert first and len({ref.cpu for ref in first}) == len(first) <= 4
        assert all(ref[2:] == (ref.cpu, 1, ()) and ref.cpu is not None for ref in first)
    monitor.close()


@pytest.mark.parametrize("kernel", [NEWEST])
def test_held_still(tmp_path: Path, kernel: str) -> None:
    vmlinux = str(kernels.debug_info(kernel))
    with kept(tmp_path, kernel, *CHURN) as qmp:
        for types in (["--debuginfo", "btf"], ["-s", vmlinux, "--no-default-symbols"]) * 2:
            audited = from_outside(qmp, "--pause", *types)
            assert check_found_nothing(audited, "qemu") == 0
            assert audited["report"]["looks"] == 1
            assert is_running(tmp_path)
        check_registers_are_not_known(qmp)


def stop(qmp: Path) -> None:
    """Stop a guest, as ``virsh suspend`` does."""
    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.connect(str(qmp))
        with monitor.makefile("rw") as stream:
            assert "QMP" in json.loads(stream.readline())
            for command in ("qmp_capabilities", "stop"):
                stream.write(json.dumps({"execute": command}) + "\n")
                stream.flush()
                while "return" not in json.loads(stream.readline()):
                    pass


@pytest.mark.parametrize("kernel", [NEWEST])
def test_a_guest_that_somebody_stopped(tmp_path: Path, kernel: str) -> None:
    """What its CPUs have half done is there in each sample, and is no finding."""
    with kept(tmp_path, kernel, *CHURN) as qmp:
        time.sleep(1)
        stop(qmp)
        audited = from_outside(qmp)
        report = audited["report"]
        assert report["findings"] == []
        if report["looks"] > 1:
            assert report["notes"] == [STANDS_STILL]
            assert report["verdict"] in ("moving", "incomplete")
        assert check_found_nothing(from_outside(qmp, "--pause"), "qemu") == 0


def interrupted(qmp: Path, number: int) -> int:
    """Begin a paused audit, and end it while the guest stands still."""
    command = [sys.executable, "-m", "memcg_inspect", "--qemu", str(qmp), "--pause", "audit"]
    hook = "import memcg_inspect.collect.owners as c, time\n" + (
        "c.read_memcgs = lambda *a, f=c.read_memcgs: (print('reading', flush=True), "
        "time.sleep(5), f(*a))[-1]\n"
    )
    run = "import sys; from memcg_inspect.__main__ import entry"
    code = f"{hook}{run}; sys.argv={command[2:]!r}; entry()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(number)
        process.stdout.read()
        return process.wait(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_let_go_in_any_case(tmp_path: Path, number: signal.Signals) -> None:
    with kept(tmp_path, NEWEST, "--nodes", "1", "--freeze", "none") as qmp:
        status = interrupted(qmp, number)
        assert status == (130 if number == signal.SIGINT else 128 + number)
        assert is_running(tmp_path)


def test_progress_on_a_terminal_only(lab: Any) -> None:
    image = str(lab.image(NEWEST).core)
    command = [sys.executable, "-m", "memcg_inspect", "audit", "-c", image, "--debuginfo", "btf"]
    piped = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert piped.stderr == b""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        shown = b"".join(read_terminal(ours))
        assert process.wait(timeout=60) == 0
    os.close(ours)
    assert b"reading" in shown
    assert b"%" in shown
