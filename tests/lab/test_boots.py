# SPDX-License-Identifier: LGPL-2.1-or-later
"""Real guests of real kernels."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from labkit import images, kernels, poke
from support.live_guest import FLUSH

PROJECT = Path(__file__).resolve().parent.parent.parent
LAB = PROJECT / "scripts" / "lab"

#: Tests do not wait for a build.
BUILT_HERE = ["7.3-lab"] if kernels.cached("7.3-lab") else []


def lab(*words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command of the lab."""
    command = [sys.executable, str(LAB), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == status, done.stderr
    return done


def told(image: Path, which: str = "2") -> Path:
    return image.with_name(image.name + ".guest") / which


def differing_bytes(one: Path, other: Path) -> int:
    """Return how many bytes of two files of the same size differ."""
    count = 0
    with open(one, "rb") as a, open(other, "rb") as b:
        while piece := a.read(1 << 20):
            if piece != (same := b.read(1 << 20)):
                count += sum(x != y for x, y in zip(piece, same, strict=True))
        assert not b.read(1)
    return count


def numbers(path: Path) -> dict[str, int]:
    """Read a file like memory.stat."""
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def test_a_kernels_folder() -> None:
    folder = Path(lab("kernel", "7.3").stdout.strip())
    assert {"vmlinux", "bzImage", "modules", "config", "release"} <= set(os.listdir(folder))
    assert (folder / "release").read_text().startswith("7.3.")
    assert (folder / "vmlinux").read_bytes()[:4] == b"\x7fELF"


def test_files_on_four_nodes() -> None:
    image = images.image("7.3", "4", "files")
    root = numbers(told(image) / "cgroup" / "memory.stat")
    assert root["slab_reclaimable"] > 1 << 20
    meta = json.loads((told(image, "meta.json")).read_text())
    assert (meta["kernel"], meta["nodes"], meta["cpus"]) == ("7.3", "4", 4)
    paths = [line.split(" ", 1)[1] for line in (told(image) / "cgroups").read_text().splitlines()]
    assert {"/files/web", "/files/db", "/files/mail", "/files/build"} <= set(paths)
    assert "/files/gone" not in paths
    for word in ("/files/web", "/files/db"):
        # every node holds something of every memcg
        text = (told(image) / f"cgroup{word}" / "memory.numa_stat").read_text()
        line = next(one for one in text.splitlines() if one.startswith("slab_unreclaimable"))
        assert all(int(cell.split("=")[1]) > 0 for cell in line.split()[1:])


def test_a_settled_guest_stands_still() -> None:
    image = images.image("7.3", "4", "files")
    # Soon after the workload, what it freed may still wait for RCU.
    first, second = (told(image, when) / "cgroup/files/db" for when in ("2", "3"))
    assert (first / "memory.current").read_text() == (second / "memory.current").read_text()
    # Statistics are not flushed for each reader: up to so many pages may wait
    # (memcg_vmstats_needs_flush(), MEMCG_CHARGE_BATCH for each of four CPUs).
    waiting = 64 * 4096 * 4
    before, after = (
        re.findall(r"=(\d+)", (folder / "memory.numa_stat").read_text())
        for folder in (first, second)
    )
    assert len(before) == len(after) > 0
    assert all(abs(int(a) - int(b)) <= waiting for a, b in zip(before, after, strict=True))


@pytest.mark.each_kernel
@pytest.mark.parametrize("kernel", ["6.1", "6.12", "7.2", "7.3", *BUILT_HERE])
def test_mixed_has_every_kind(kernel: str) -> None:
    image = images.image(kernel, "2cpu+6mem", "mixed")
    root = numbers(told(image) / "cgroup" / "memory.stat")
    kinds = ["slab_reclaimable", "slab_unreclaimable", "percpu", "sock", "kernel_stack",
             "pagetables", "vmalloc", "anon", "file"]  # fmt: skip
    # Debian builds 6.1 and 6.12 without zswap
    if kernels.kernel(kernel).config.get("CONFIG_ZSWAP"):
        kinds += ["zswap", "zswapped"]
    assert [kind for kind in kinds if root[kind] == 0] == []
    stat = numbers(told(image) / "cgroup" / "cgroup.stat")
    assert stat["nr_dying_descendants"] >= 8


def test_poke_changes_what_was_named_and_nothing_else(tmp_path: Path) -> None:
    image = images.image("7.3", "4", "files")
    out = tmp_path / "poked"
    page = "root_mem_cgroup.memory.usage"
    (first, second) = poke.poke(
        image, out, None, [(page, "old + 4096"), ("u64:root_mem_cgroup.vmstats.value_()", "-1")]
    )
    before = poke.open_program(image, poke.vmlinux_of(image))
    after = poke.open_program(out, poke.vmlinux_of(out))
    usage = before["root_mem_cgroup"].memory.usage.counter.value_()
    assert after["root_mem_cgroup"].memory.usage.counter.value_() == usage + 4096
    assert after.read_u64(second[0]) == (1 << 64) - 1
    assert first[1] == (usage + 4096).to_bytes(8, "little")
    assert differing_bytes(image, out) <= 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no_such_symbol=1", "no_such_symbol"),
        ("root_mem_cgroup.memory=1", "not a word"),
        ("u64:0x10=1", "not mapped"),
        ("u8:root_mem_cgroup.value_()=256", "does not fit"),
        ("root_mem_cgroup", "not WHAT=VALUE"),
    ],
)
def test_poke_refuses(change: str, message: str, tmp_path: Path) -> None:
    image = images.image("7.3", "4", "files")
    done = lab("poke", image, tmp_path / "out", change, status=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_live_passes_output_and_status_on() -> None:
    done = lab("live", "--kernel", "7.3", "--nodes", "2", "--", "sh", "-c",
               "uname -r; test -r /proc/kcore; pwd; echo oops >&2; exit 7", status=7)  # fmt: skip
    release, folder = done.stdout.splitlines()
    assert release == kernels.kernel("7.3").release
    # a guest has a /tmp of its own, but for what comes from there
    assert folder == os.getcwd()
    assert "oops" in done.stderr.splitlines()


def test_live_cannot_write_to_this_machine() -> None:
    here = Path(__file__)
    stamp = here.stat().st_mtime_ns
    lab("live", "--kernel", "7.3", "--", "sh", "-c", f"touch {here} && exit 1 || exit 0")
    assert here.stat().st_mtime_ns == stamp


def test_up_exec_down(tmp_path: Path) -> None:
    state = tmp_path / "state"
    script = tmp_path / "script"
    script.write_text("cat /proc/self/cgroup; echo no >&2; exit 4\n")
    path = Path(lab("up", "--kernel", "7.3", "--state", state).stdout.strip())
    assert path.is_socket()
    pid = json.loads((state / "state.json").read_text())["pid"]
    try:
        done = lab("exec", state, script, status=4)
        assert (done.stdout, done.stderr) == ("0::/\n", "no\n")
        assert (
            "keeps a guest already"
            in lab("up", "--kernel", "7.3", "--state", state, status=2).stderr
        )
    finally:
        lab("down", path)
    assert not path.exists()
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    assert "no guest" in lab("down", state, status=2).stderr


def test_a_script_that_fails_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo went wrong >&2; exit 3\n")
    done = lab("dump", "--kernel", "7.3", "--run", script, "--out", tmp_path / "x", status=2)
    assert "status 3" in done.stderr and "went wrong" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


def test_a_panic_that_nobody_asked_for_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo c >/proc/sysrq-trigger\n")
    done = lab("dump", "--kernel", "7.3", "--run", script, "--out", tmp_path / "x", status=2)
    assert "Kernel panic" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


def children_of(pid: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    """Return the name of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


def test_the_guest_ends_with_the_lab(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("sleep 1000\n")
    command = [sys.executable, str(LAB), "dump", "--kernel", "7.3", "--run", str(script)]
    command += ["--out", str(tmp_path / "x")]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    guests: list[int] = []
    while not guests:
        assert running.poll() is None
        guests = [pid for pid in children_of(running.pid) if "qemu" in name_of(pid)]
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 130
    # If the signal came while QEMU was being started, the kernel ends it (PR_SET_PDEATHSIG).
    for _ in range(600):
        if not any("qemu" in name_of(pid) and is_running(pid) for pid in guests):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(f"QEMU did not end: {guests}")
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kernel", "5.0"], "no kernel '5.0'"),
        (["--kernel", "7.3", "--nodes", "x"], "not a topology"),
        (["--kernel", "7.3", "--workload", "x"], "no workload 'x'"),
        (["--kernel", "7.3", "--cgroup", "v1"], "no cgroup v1"),
        (["--kernel", "7.3", "--workload", "churn"], "never rests"),
        (["--kernel", "7.3", "--level", "5"], "--level needs"),
        (["--kernel", "7.3", "--cpus", "100000"], "QEMU did not start: qemu-system-x86_64: "),
        (["--kernel", "7.3", "--memory", "9999999G"], "QEMU did not start: qemu-system-x86_64: "),
        (["--kernel", "7.3", "--run", "/no/such"], "no such file"),
        (["--kernel", "7.3", "--module", "fixtures/modules/charge"], "not built here"),
    ],
)
def test_mistakes_get_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    done = lab("dump", *words, "--out", tmp_path / "x", status=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.long), 23])
def test_a_crash_saved_by_the_crash_kernel(level: int) -> None:
    image = images.image("6.1", "4", "mixed", "panic", format="kdump", level=level)
    program = poke.open_program(image, poke.vmlinux_of(image))
    assert program["panic_cpu"].counter.value_() >= 0


def test_makedumpfile_on_the_host() -> None:
    image = images.image("7.3", "2", "idle", format="kdump", level=23)
    assert image.read_bytes()[:8] == b"KDUMP   "
    poke.open_program(image, poke.vmlinux_of(image))


def test_a_busy_guest_is_stopped_in_full_flight() -> None:
    image = images.image("7.3", "4", "churn", "busy", seed=1)
    program = poke.open_program(image, poke.vmlinux_of(image))
    assert program["nr_threads"].value_() > 4


@pytest.mark.parametrize("kernel", BUILT_HERE)
def test_planted_charges_on_chosen_nodes(kernel: str, tmp_path: Path) -> None:
    script = tmp_path / "plant"
    script.write_text(
        "set -e\ncd /sys/fs/cgroup\necho +memory >cgroup.subtree_control\nmkdir planted\n"
        # One CPU charges, so that only its stock can hold some of it.
        "taskset -p 1 $$ >/dev/null\n"
        "(echo 0 >planted/cgroup.procs\n"
        "for line in 'kmalloc 0 20000 2' 'cache 1 0 7' 'pages 1 2 3' 'percpu 4096 8 2' "
        "'vmalloc -1 100000 2'; do echo $line >/sys/kernel/debug/charge/make; done)\n"
        f"{FLUSH}"
    )
    module = (str(PROJECT / "fixtures" / "modules" / "charge"), "")
    image = images.image(kernel, "2", modules=(module,), run=str(script))
    folder = told(image) / "cgroup" / "planted"
    assert numbers(folder / "memory.stat")["percpu"] == 2 * 4096 * (2 + 2)
    text = (folder / "memory.numa_stat").read_text()
    line = next(one for one in text.splitlines() if one.startswith("slab_unreclaimable"))
    # Two large kmallocs of eight pages on node 0. Of small objects of the shell's, what was freed
    # may be counted while what was charged is still in the stock of the CPU.
    assert abs(int(line.split()[1].removeprefix("N0=")) - 65536) < 4096
    held = (told(image) / "sys/kernel/debug/charge/held").read_text().splitlines()
    assert len(held) == 2 + 7 + 3 + 2 + 2
