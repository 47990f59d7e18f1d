# SPDX-License-Identifier: LGPL-2.1-or-later
"""``top`` in a terminal, beside a guest whose own files say what it must show."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.guests import DEBIAN_KERNELS
from support.live_guest import FLUSH, execute, kept
from support.live_screens import TerminalScreen, terminal_of

from memcg_inspect.top.screen import compact

pytestmark = pytest.mark.image

#: A memcg whose inodes and dentries are charged to it, more and more of them.
GROW = """
set -e
cd /sys/fs/cgroup
echo +memory >cgroup.subtree_control
mkdir grows
mkdir -p /run/grows && mount -t tmpfs none /run/grows
cat >/run/grow.sh <<'EOF'
echo 0 >/sys/fs/cgroup/grows/cgroup.procs
n=0
while :; do n=$((n + 1)); : >/run/grows/$n; sleep 0.02; done
EOF
sh /run/grow.sh >/dev/null 2>&1 &
"""
STATS = f"""
{FLUSH}
cd /sys/fs/cgroup
for memcg in $(find . -type d); do
	echo "$memcg $(grep '^slab ' $memcg/memory.stat)" \
		"$(grep -E '^slab_(un)?reclaimable ' $memcg/memory.numa_stat | tr '\\n' ' ')"
done
"""


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("guest")
    options = ("--nodes", "4", "--workload", "mixed", "--freeze", "none")
    with kept(folder, DEBIAN_KERNELS[-1], *options):
        yield folder


def command(guest: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "memcg_inspect", "--qemu", str(guest / "qmp"), "top", *words]


def batch(guest: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(guest, "--batch", *words),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def stats(guest: Path) -> dict[str, list[int]]:
    """Return what the guest's files say of slab memory: of all nodes together, and of each."""
    found = {}
    for line in execute(guest, STATS).splitlines():
        path, _, total, *rest = line.split()
        by_node = [
            int(size) for word in rest if (size := word.partition("=")[2]) and word[0] == "N"
        ]
        nodes = [sum(by_node[n::4]) for n in range(4)]
        found[path.removeprefix(".") or "/"] = [int(total), *nodes]
    return found


def test_amounts_are_those_of_the_guest(guest: Path) -> None:
    before = stats(guest)
    done = batch(guest, "--count", "1")
    after = stats(guest)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {}
    for line in done.stdout.splitlines()[3:]:
        if line and " D " not in line:  # the guest has no files of those
            path, *cells = line.split()
            rows[path] = cells
    same = {path for path in before if before[path] == after.get(path)}
    assert len(same) > 20
    assert same <= set(rows)
    for path in same:
        total, rate, *nodes = rows[path]
        assert [total, *nodes] == [compact(value) for value in before[path]], path
        assert rate == "-"


def test_what_grows_is_found_and_what_is_removed_is_marked(guest: Path) -> None:
    execute(guest, GROW)
    with terminal_of(command(guest, "--every", "1", "--sort", "rate"), 80, 24) as screen:
        # The root grows by the same, and by what others allocate.
        lines = screen.wait(lambda lines: re.search(r"^/grows .*\+", "\n".join(lines[3:5]), re.M))
        assert lines[0].startswith("memcg-inspect top ")
        assert lines[1].startswith("slab by rate")
        assert lines[2].split()[:3] == ["memcg", "total", "rate/s"]
        assert lines[2].endswith("node 0  node 1  node 2  node 3")
        assert all(len(line) <= 80 for line in lines)
        screen.press("/files/gone\r")
        screen.wait(lambda lines: re.match(r"/files/gone +D ", lines[3]))
        screen.press("\x1b")
        screen.wait(lambda lines: lines[4].startswith("/"))
        screen.press("/grows\r")
        screen.wait(lambda lines: lines[3].startswith("/grows") and not lines[4].startswith("/"))
        screen.press("\r")
        lines = screen.wait(lambda lines: any(line.startswith("slab recl") for line in lines))
        assert lines[1].startswith("kinds by rate; ")
        assert lines[1].endswith("; /grows")
        screen.press("\t")
        screen.wait(lambda lines: any(line.startswith("shmem_inode_cache") for line in lines))
        # Its inodes grow, told by cache.
        screen.wait(lambda lines: re.search(r"^shmem_inode_cache .*\+", "\n".join(lines), re.M))
        screen.press("\x1ba")
        screen.wait(lambda lines: re.search("audit .*: (EXACT|MOVING|INCOMPLETE)", lines[1]))
        screen.press("q")
        assert screen.ended() == 0


def ready(screen: TerminalScreen) -> None:
    screen.wait(lambda lines: any(line.startswith("/ ") for line in lines))


def test_the_terminal_is_given_back(guest: Path) -> None:
    with terminal_of(command(guest, "--every", "60")) as screen:
        ready(screen)
        assert screen.settings_now() != screen.settings
        screen.resize(60, 12)
        screen.process.send_signal(signal.SIGWINCH)
        screen.wait(lambda lines: len(lines[2]) <= 60 and lines[11].startswith("q quit"))
        # Nobody could continue a leader of a session: it is not stopped.
        screen.press("\x1ai")
        screen.wait(lambda lines: lines[1].startswith("current"))
        screen.press("\x03")
        assert screen.ended() == 130
        assert screen.settings_now() == screen.settings
        # It has left the alternate screen, and shows the cursor.
        assert screen.raw.rindex(b"\x1b[?1049l") > screen.raw.rindex(b"\x1b[?1049h")
        assert screen.raw.rindex(b"\x1b[?25h") > screen.raw.rindex(b"\x1b[?25l")


def test_stopped_and_continued(guest: Path) -> None:
    words = shlex.join(command(guest, "--every", "60"))
    script = f"{words}; echo stopped $?; read -r; fg >/dev/null; echo ended $?"
    with terminal_of(["bash", "-m", "-c", script]) as screen:
        ready(screen)
        screen.press("\x1a")
        screen.wait(lambda lines: f"stopped {128 + signal.SIGTSTP}" in lines)
        assert screen.settings_now()[3] & termios.ECHO
        screen.press("\r")
        screen.wait(lambda lines: lines[0].startswith("memcg-inspect top"))
        assert not screen.settings_now()[3] & termios.ECHO
        screen.press("q")
        screen.wait(lambda lines: "ended 0" in lines)
        assert screen.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_give_the_terminal_back(guest: Path, number: signal.Signals) -> None:
    with terminal_of(command(guest, "--every", "60")) as screen:
        ready(screen)
        screen.process.send_signal(number)
        assert screen.ended() == 128 + number
        assert screen.settings_now() == screen.settings


@pytest.mark.parametrize("keys", ["", "/filter", "h", "\r"])
def test_a_window_that_is_closed(guest: Path, tmp_path: Path, keys: str) -> None:
    said = tmp_path / "said"
    with open(said, "w") as file, terminal_of(command(guest, "-d", "1"), stderr=file) as screen:
        ready(screen)
        screen.press(keys)
        screen.read(0.5)
        screen.hang_up()
        assert screen.process.wait(60) == 128 + signal.SIGHUP
    assert said.read_text() == ""


def test_a_terminal_that_is_none_of_its_own(guest: Path, tmp_path: Path) -> None:
    """Without SIGHUP, it ends when there is nothing to read any more."""
    said = tmp_path / "said"
    with (
        open(said, "w") as file,
        terminal_of(command(guest), stderr=file, controls=False) as screen,
    ):
        ready(screen)
        screen.press("/ab")
        screen.read(0.5)
        screen.hang_up()
        assert screen.process.wait(60) == 0
    assert said.read_text() == ""


def test_nobody_reads_the_pages(guest: Path) -> None:
    words = shlex.join(command(guest, "--batch", "--every", "1"))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{words} | head -n 3"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("memcg-inspect top ")


def test_it_ends_by_itself(guest: Path) -> None:
    with terminal_of(command(guest, "--every", "1", "--count", "2")) as screen:
        assert screen.ended() == 0
        # The last page stays on the terminal.
        after = screen.raw[screen.raw.rindex(b"\x1b[?1049l") :]
        assert b"slab by total" in after
    done = batch(guest, "--every", "1", "--count", "3", "--item", "current", "--sort", "name")
    pages = done.stdout.rstrip().split("\n\n")
    assert (done.returncode, len(pages)) == (0, 3)
    assert "current by name" in pages[2]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--item", "nothing"), "--item: this kernel has slab, current,"),
        (("--sort", "node 9"), ":asc or :desc: name, total, rate, node 0,"),
        (("--sort", "total:up"), "--sort takes a column"),
        (("--every", "0"), "--every"),
    ],
)
def test_arguments_that_are_wrong(guest: Path, words: tuple[str, ...], why: str) -> None:
    done = batch(guest, "--count", "1", *words)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("force", ["", "1"])
def test_without_a_terminal(guest: Path, force: str) -> None:
    done = subprocess.run(
        command(guest), capture_output=True, text=True, timeout=120, check=False,
        stdin=subprocess.DEVNULL, env=os.environ | {"FORCE_COLOR": force, "COLUMNS": "40"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "memcg-inspect: top needs a terminal; --batch prints pages one after the other\n"
    )


def test_a_guest_that_ends_meanwhile(tmp_path: Path) -> None:
    options = ("--nodes", "1", "--workload", "idle", "--freeze", "none")
    with (
        # The lab misses a guest that has ended.
        suppress(subprocess.CalledProcessError),
        kept(tmp_path, DEBIAN_KERNELS[-1], *options),
        terminal_of(command(tmp_path, "--every", "1")) as screen,
    ):
        ready(screen)
        os.kill(_qemu_of(tmp_path), signal.SIGKILL)
        screen.wait(lambda lines: lines[1].startswith("sample failed: "))
        # What was read is still there.
        assert any(line.startswith("/ ") for line in screen.lines())
        screen.press("q")
        assert screen.ended() == 3


def _qemu_of(folder: Path) -> int:
    """Return the process that serves a QMP socket."""
    name = str(folder / "qmp").encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(b"qemu-system-x86_64") and any(name in word for word in words):
                return int(entry.name)
    raise AssertionError("no QEMU serves it")
