# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Real crashes of Debian, with its own kdump-tools
------------------------------------------------

Each guest has Debian's root file system, and kdump-tools as it configures itself. The package and
its service are installed with two commands, as docs/crash.md says. Then the guest crashes, its
crash kernel saves the memory, and after the next boot the report is there, though nobody asked for
it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from labkit import rootfs
from labkit.guest import Guest
from labkit.wheels import SETUP, wheel_disk
from support.guests import ROOT

pytestmark = [pytest.mark.image, pytest.mark.long]

SYSRQ = "echo c >/proc/sysrq-trigger"
OOPS = "insmod /usr/local/lib/lab/oops.ko"
DOCUMENT = ROOT / "docs" / "crash.md"
#: What the first test writes with --write-docs.
BEGIN, END = "<!-- crash -->", "<!-- /crash -->"
#: Seconds, under TCG on a busy machine.
PATIENCE = 900
#: Waits until the service, which a timer starts after the boot, has ended.
REPORTED = """
unit=memcg-inspect-crash.service
until [ "$(systemctl show -P InactiveEnterTimestampMonotonic $unit)" != 0 ] &&
	[ "$(systemctl show -P ActiveState $unit)" = inactive ]; do sleep 1; done
systemctl show -P Result $unit
"""
#: Keeps it from looking at what is there before the crash.
LEFT_ALONE = "systemctl stop memcg-inspect-crash.timer memcg-inspect-crash.path"
CONFIGURE = (
    "sed -i '/^#*{0}=/d' /etc/default/kdump-tools; echo '{0}=\"{1}\"' >>/etc/default/kdump-tools"
)
#: Lets root in on the console, without a password.
AUTOLOGIN = """
set -e
cd /run/systemd/system
mkdir -p serial-getty@ttyS0.service.d
cat >serial-getty@ttyS0.service.d/root.conf <<'EOF'
[Service]
ExecStart=
ExecStart=-/sbin/agetty --autologin root --keep-baud 115200 %I vt220
EOF
systemctl daemon-reload
systemctl restart serial-getty@ttyS0.service
"""
#: Begins the message of the day.
MESSAGE = "memcg-inspect has looked at new crash dumps:"


@dataclass
class Debian:
    """A Debian on a disk, which crashes and boots again."""

    made: rootfs.Disk
    path: Path
    wheels: Path

    @contextmanager
    def booted(self, append: str = "") -> Iterator[Guest]:
        with rootfs.booted(self.made, self.path, also=[self.wheels], append=append) as guest:
            yield guest


def sh(guest: Guest, script: str) -> str:
    return guest.must(script, what=script.strip()[:60], timeout=PATIENCE).decode()


def two_commands() -> list[str]:
    """Return the commands by which docs/crash.md installs the service."""
    text = (ROOT / "docs" / "crash.md").read_text()
    return [line.strip() for line in text.split("\n\n")[2].splitlines()]


@contextmanager
def debian(series: str, folder: Path, modules: tuple[Path, ...] = ()) -> Iterator[Debian]:
    """Yield a Debian on which the service has just been installed."""
    made = rootfs.disk(series, modules)
    with rootfs.copied(made) as path:
        machine = Debian(made, path, wheel_disk(folder, made.python))
        commands = two_commands()
        assert len(commands) == 2
        with machine.booted() as guest:
            sh(guest, SETUP)
            sh(guest, "\n".join(["set -e", *commands]))
            assert "ready to kdump" in sh(guest, "kdump-config status")
            rootfs.power_off(guest)
        yield machine


def crash(machine: Debian, how: str, settings: dict[str, str] | None = None) -> None:
    """Crash a guest, and let it save its memory."""
    # xz does not fit into the 128 MiB that Debian 12 reserves: the crash kernel kills it.
    append = "crashkernel=320M" if "xz" in (settings or {}).values() else ""
    with machine.booted(append) as guest:
        for name, value in (settings or {}).items():
            sh(guest, CONFIGURE.format(name, value))
        if settings:
            sh(guest, "kdump-config unload; kdump-config load")
        sh(guest, LEFT_ALONE)
        sh(guest, "rm -rf /var/crash/2*; sync")
        guest.end_by(how, timeout=PATIENCE, what=f"crash by {how}")


def reported(machine: Debian) -> dict[str, Any]:
    """Boot again, wait for the report, and return what is there."""
    with machine.booted() as guest:
        assert sh(guest, REPORTED).strip() == "success", sh(
            guest, "journalctl --no-pager -u memcg-inspect-crash.service"
        )
        names = sh(guest, "cd /var/crash; find . -type f -path './2*' -printf '%P %m\\n'")
        files = dict(line.rsplit(" ", 1) for line in names.splitlines())
        (folder,) = {Path(name).parent for name in files}
        entries = sh(guest, "journalctl -t memcg-inspect -b -o json --no-pager")
        found = {
            "files": {Path(name).name: mode for name, mode in files.items()},
            "text": sh(guest, f"cat /var/crash/{folder}/report.txt"),
            "report": json.loads(sh(guest, f"cat /var/crash/{folder}/report.json")),
            "journal": [json.loads(line) for line in entries.splitlines()],
            "login": logged_in(guest),
            "folder": f"/var/crash/{folder}",
            "failed": sh(guest, "systemctl --failed --no-legend"),
            "state": sh(guest, "systemctl is-system-running || true").strip(),
            "dump": guest.must(f"head -c 16 /var/crash/{folder}/dump.*", what="read the dump"),
            "again": sh(
                guest,
                "systemctl start memcg-inspect-crash.service; ls -l --full-time "
                f"/var/crash/{folder}/report.txt",
            ),
            "first": sh(guest, f"ls -l --full-time /var/crash/{folder}/report.txt"),
        }
        rootfs.power_off(guest)
    return found


def logged_in(guest: Guest) -> str:
    """Return what the console shows when root logs in."""
    sh(guest, AUTOLOGIN)
    end = time.monotonic() + PATIENCE
    while "report: " not in guest.qemu.console().partition(MESSAGE)[2]:
        assert time.monotonic() < end, guest.qemu.console()[-2000:]
        time.sleep(1)
    return guest.qemu.console().partition(MESSAGE)[2]


def check_told(found: dict[str, Any], verdict: str | None) -> None:
    """Check what the journal and the message of the day say."""
    (entry,) = found["journal"]
    dump = entry["MEMCG_INSPECT_DUMP"]
    assert re.fullmatch(rf"{found['folder']}/dump\.\d{{12}}(\.\w+)?", dump)
    assert entry["MEMCG_INSPECT_VERDICT"] == (verdict or "")
    assert entry["MEMCG_INSPECT_REPORT"] == f"{found['folder']}/report.txt"
    assert entry["PRIORITY"] == ("5" if verdict == "exact" else "4")
    assert dump in found["login"]
    assert (found["failed"], found["state"]) == ("", "running")
    # What has a report is left alone.
    assert found["again"] == found["first"]


def check_exact(found: dict[str, Any]) -> None:
    assert found["report"]["verdict"] == "exact", found["text"]
    assert found["text"].startswith("EXACT")
    assert found["report"]["image"]["source"] == "vmcore"
    assert {"report.txt", "report.json", "report.html"} <= set(found["files"])
    # The slices and services of systemd are there.
    paths = {memcg["path"] for memcg in found["report"]["memcgs"]}
    assert {"/system.slice", "/init.scope"} <= paths
    check_told(found, "exact")


@pytest.fixture(scope="module")
def bookworm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    with debian("6.1", tmp_path_factory.mktemp("6.1")) as machine:
        yield machine


@pytest.fixture(scope="module")
def trixie(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    oops = ROOT / "fixtures" / "modules" / "oops"
    with debian("6.12", tmp_path_factory.mktemp("6.12"), (oops,)) as machine:
        yield machine


@pytest.fixture(scope="module")
def backports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    with debian("7.3", tmp_path_factory.mktemp("7.3")) as machine:
        yield machine


def test_a_crash_as_it_comes(bookworm: Debian, request: pytest.FixtureRequest) -> None:
    crash(bookworm, SYSRQ)
    found = reported(bookworm)
    # Debian saves them flattened.
    assert found["dump"].startswith(b"makedumpfile")
    check_exact(found)
    if request.config.getoption("--write-docs"):
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{shown(found)}{END}{rest.partition(END)[2]}")


def shown(found: dict[str, Any]) -> str:
    """Return what a user sees after a crash."""
    (entry,) = found["journal"]
    commands = {
        "journalctl -b -t memcg-inspect -o cat": entry["MESSAGE"],
        f"ls {found['folder']}": "\n".join(sorted(found["files"])),
        f"cat {found['folder']}/report.txt": found["text"].rstrip(),
    }
    text = "\n\n".join(f"# {command}\n{output}" for command, output in commands.items())
    return f"```text\n{text}\n```\n"


def test_the_document_shows_a_crash() -> None:
    body = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert "memory accounting is exact" in body
    assert "\nEXACT" in body


@pytest.mark.parametrize(("compression", "suffix"), [("gzip", "gz"), ("xz", "xz")])
def test_compressed_dumps(bookworm: Debian, compression: str, suffix: str) -> None:
    crash(bookworm, SYSRQ, {"KDUMP_COMPRESSION": compression})
    found = reported(bookworm)
    assert any(name.endswith(f".{suffix}") for name in found["files"])
    check_exact(found)


def test_an_oops_in_a_module(trixie: Debian) -> None:
    crash(trixie, OOPS)
    found = reported(trixie)
    check_exact(found)


@pytest.mark.parametrize(("compression", "suffix"), [("lz4", "lz4"), ("bzip2", "bz2")])
def test_other_compressed_dumps(trixie: Debian, compression: str, suffix: str) -> None:
    crash(trixie, SYSRQ, {"KDUMP_COMPRESSION": compression})
    found = reported(trixie)
    assert any(name.endswith(f".{suffix}") for name in found["files"])
    check_exact(found)


def test_a_dump_without_pages_of_slabs(backports: Debian) -> None:
    """makedumpfile 1.7.6 damages dumps of 7.1 and newer at level 31, the default."""
    with backports.booted() as guest:
        config = guest.sh("/opt/memcg-inspect/bin/memcg-inspect crash config", what="config")
        assert config.status == 1
        text = sh(guest, "/opt/memcg-inspect/bin/memcg-inspect crash config --fix || true")
        rootfs.power_off(guest)
    crash(backports, SYSRQ)
    found = reported(backports)
    assert found["report"]["verdict"] in (None, "incomplete")
    # What it says is what to do.
    assert text.rstrip() in found["text"]
    check_told(found, found["report"]["verdict"])
    fix = re.fullmatch(r"set (\w+)=\"(.*)\" in /etc/default/kdump-tools\n", text)
    assert fix is not None, text
    with backports.booted() as guest:
        sh(guest, CONFIGURE.format(*fix.groups()))
        config = guest.sh("/opt/memcg-inspect/bin/memcg-inspect crash config", what="config")
        assert config.status != 1, config.out.decode()
        rootfs.power_off(guest)
    crash(backports, SYSRQ)
    check_exact(reported(backports))
