# SPDX-License-Identifier: LGPL-2.1-or-later
"""
``watch`` tells what leaks from what comes and goes: one memcg of a guest writes to a file of tmpfs
all the time, and others are made, used and removed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.guests import DEBIAN_KERNELS, ROOT
from support.live_guest import LAB, execute, kept
from support.signals import with_interrupts

from memcg_inspect.snapshots.file import read_snapshot

pytestmark = pytest.mark.image

GUEST = ("--nodes", "2", "--workload", "idle", "--freeze", "none")
#: 64 KiB ten times a second; and, in a memcg of its own, a file that grows and is emptied again.
LEAK = """
set -e
mkdir -p /run/leak && mount -t tmpfs none /run/leak
cd /sys/fs/cgroup
echo +memory >cgroup.subtree_control
mkdir leak noise
cat >/run/leak.sh <<'EOF'
echo 0 >/sys/fs/cgroup/leak/cgroup.procs
while :; do dd if=/dev/zero bs=65536 count=1 >>/run/leak/all 2>/dev/null; sleep 0.1; done
EOF
cat >/run/noise.sh <<'EOF'
echo 0 >/sys/fs/cgroup/noise/cgroup.procs
while :; do dd if=/dev/zero bs=65536 count=64 >/run/leak/some 2>/dev/null; sleep 0.7
: >/run/leak/some; sleep 0.7; done
EOF
sh /run/leak.sh >/dev/null 2>&1 &
sh /run/noise.sh >/dev/null 2>&1 &
"""


def command(qmp: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "memcg_inspect", "--qemu", str(qmp), "watch", *words]


def test_a_leak_among_noise(tmp_path: Path) -> None:
    guest, folder = tmp_path / "guest", tmp_path / "snapshots"
    guest.mkdir()
    with kept(guest, DEBIAN_KERNELS[-1], *GUEST) as qmp:
        execute(guest, LEAK)
        words = ("--every", "2", "--count", "7", "--keep", "5", "-o", str(folder), "--json")
        done = subprocess.run(
            command(qmp, *words, "--by", "memcg,kind"),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        # 3: memory that changes cannot always be read.
        assert done.returncode in (0, 3), done.stderr
        interrupted(qmp, tmp_path)
    lines = done.stderr.splitlines()
    assert len(lines) == 7
    assert " charged, " not in lines[0]
    assert all(" charged, " in line for line in lines[1:])
    by_kind, memcgs, _, snapshots = json.loads(done.stdout)["tables"]
    assert (by_kind["name"], memcgs["name"]) == ("trend_memcg_kind", "memcgs")
    (leak,) = (r for r in by_kind["rows"] if (r["memcg"], r["kind"]) == ("/leak", "lru"))
    seconds = clock(snapshots["rows"][-1]["time"]) - clock(snapshots["rows"][0]["time"])
    # At most ten times a second; clocks are read to the second. Whether what comes and goes is told
    # from it depends on chance here: tests/snapshots makes it up.
    assert 0 < leak["last"] - leak["first"] < 65536 * 10 * (seconds + 2)
    assert leak["grows"]
    assert leak["per_hour"] > 0
    # The first and the last are kept, and few of the others.
    files = sorted(folder.iterdir())
    assert 3 <= len(files) <= 5
    assert (files[0].name[-11:], files[-1].name[-11:]) == ("00001.memcg", "00007.memcg")
    assert [row["snapshot"] for row in snapshots["rows"]] == [file.name for file in files]
    assert all(read_snapshot(str(file)).image.source == "qemu" for file in files)


def clock(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


def interrupted(qmp: Path, folder: Path) -> None:
    """Ctrl-C ends it: it prints what it has found, and leaves no files."""
    temporary = folder / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        command(qmp, "--every", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        preexec_fn=with_interrupts,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert [*temporary.iterdir()]
    process.send_signal(signal.SIGINT)
    said, error = process.communicate(timeout=300)
    assert process.returncode in (0, 3)
    assert error == ""
    assert all(" charged" in line for line in lines)
    assert "charges by memcg, node and kind" in said
    assert "what is compared" in said
    assert [*temporary.iterdir()] == []


@pytest.mark.long
def test_from_inside() -> None:
    """The kernel that it runs on, under load. Its own memory is among what it sees."""
    small = ("--nodes", "2", "--cpus", "2", "--memory", "384M", "--workload", "churn")
    program = f"nice -n -19 {sys.executable} -m memcg_inspect"
    script = " && ".join(
        f"{{ {program} {words} >&2 || [ $? -eq 3 ]; }}"
        for words in ("snapshot -o /tmp/a --debuginfo btf", "snapshot -o /tmp/b --debuginfo btf")
    )
    inside = ("sh", "-c", f"{script} && {program} diff /tmp/a /tmp/b --json")
    done = subprocess.run(
        [sys.executable, LAB, "live", "--kernel", DEBIAN_KERNELS[-1], *small, "--", *inside],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode in (0, 3), done.stderr
    document = json.loads(done.stdout)
    first, second = document["tables"][-1]["rows"]
    assert first["time"] < second["time"]
    assert (first["whole"] and second["whole"]) == (done.returncode == 0)
    assert min(first["bytes"], second["bytes"]) > 1 << 20
    assert document["tables"][0]["name"] == "growth_memcg_node_kind"
