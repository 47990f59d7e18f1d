# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports beside dumps, in the layouts of distributions; the units that make them; who is told."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.guests import Lab

from memcg_inspect.crash.dumps import dumps_below, has_report
from memcg_inspect.crash.one import Outcome, report_on
from memcg_inspect.crash.told import sentence, tell_journal, write_motd
from memcg_inspect.crash.units import UNITS, install


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "memcg_inspect", "crash", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_dumps_of_distributions(tmp_path: Path) -> None:
    wanted = [
        "202611260212/dump.202611260212",
        "202611260213/dump.202611260213.gz",
        "202611260214/vmcore.202611260214",
        "127.0.0.1-2026-11-26-02:12:00/vmcore",
        "127.0.0.1-2026-11-26-02:13:00/vmcore.flat",
        "2026-11-26-02:12/vmcore.xz",
        "vmcore",
    ]
    others = [
        "202611260212/dmesg.202611260212",
        "202611260215/dump-incomplete",
        "202611260215/dump-incomplete.gz",
        "202611260216/vmcore-incomplete",
        "202611260216/vmcore-dmesg.txt",
        "202611260216/deeper/vmcore",
        "kexec_cmd",
        "linux-image-6.12-202611260212.crash",
    ]
    for number, name in enumerate(wanted + others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (number, number))
    found = [str(path.relative_to(tmp_path)) for path in dumps_below(str(tmp_path))]
    assert found == wanted[::-1]


@pytest.mark.image
def test_a_report_is_written_once(lab: Lab, tmp_path: Path) -> None:
    core = lab.image("7.3", "2", "files").core
    first, second, third = (tmp_path / f"20261126021{n}" for n in range(3))
    for folder in (first, second, third):
        folder.mkdir()
    (first / "dump.202611260210").symlink_to(core)
    (second / "dump.202611260211").write_bytes(b"no dump" * 1000)
    (third / "dump-incomplete").write_bytes(core.read_bytes()[:4096])
    status, said, error = run("report", str(tmp_path))
    assert (status, error) == (3, "")
    lines = {line.partition(": ")[0]: line.partition(": ")[2] for line in said.splitlines()}
    assert lines[str(first / "dump.202611260210")] == "memory accounting is exact"
    assert lines[str(second / "dump.202611260211")].startswith("no report: ")
    assert "is neither an ELF core nor a dump" in (second / "report.txt").read_text()
    assert json.loads((second / "report.json").read_text())["verdict"] is None
    assert not (second / "report.html").exists()
    assert list(third.iterdir()) == [third / "dump-incomplete"]
    document = json.loads((first / "report.json").read_text())
    assert (document["schema"], document["verdict"]) == (1, "exact")
    text = (first / "report.txt").read_text()
    assert text.startswith("EXACT: ")
    assert max(map(len, text.splitlines())) <= 80
    assert '<span class="verdict exact">' in (first / "report.html").read_text()
    # Nothing is done twice, unless that is asked for.
    assert run("report", str(tmp_path)) == (0, "", "")
    (first / "report.html").unlink()
    status, said, _ = run("report", "--again", str(first / "dump.202611260210"))
    assert (status, len(said.splitlines())) == (0, 1)
    assert (first / "report.html").exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("kill -9 $$", "the audit was ended by signal 9, for lack of memory perhaps"),
        ("echo one; echo two >&2; exit 1", "a bug in memcg-inspect: two"),
        ("exit 0", "a bug in memcg-inspect: no reason was printed"),
    ],
)
def test_an_audit_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    """The dump has a report that says so, and is not tried at each boot."""
    dump, python = tmp_path / "vmcore", tmp_path / "python"
    dump.write_bytes(b"x")
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert report_on(dump, {}) == Outcome(str(dump), None, 0, why)
    assert (tmp_path / "report.txt").read_text().startswith(f"vmcore: no report: {why}\n")
    assert has_report(dump)


def test_an_audit_that_does_not_end_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine goes down meanwhile."""
    dump, python = tmp_path / "vmcore", tmp_path / "python"
    dump.write_bytes(b"x")
    python.write_text(f"#!/bin/sh\ncp {tmp_path}/report.txt {tmp_path}/meanwhile\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    report_on(dump, {})
    assert (tmp_path / "meanwhile").read_text() == (
        "The audit of vmcore has begun and did not end. To repeat it:\n"
        f"    memcg-inspect crash report --again {dump}\n"
    )


def test_wrong_arguments(tmp_path: Path) -> None:
    for words, why in (
        (["report", str(tmp_path / "none")], "No such file or directory"),
        (["install", "--root", "/dev/null"], "Not a directory"),
        (["config", "--check", "--fix"], "not allowed with argument"),
        ([], "the following arguments are required: ACTION"),
        (["destroy"], "invalid choice"),
    ):
        status, said, error = run(*words)
        assert (status, said) == (2, ""), words
        assert len(error.splitlines()) == 1, error
        assert why in error


def test_units(tmp_path: Path) -> None:
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for _ in range(2):
        made = install(str(tmp_path), "/opt/my python/bin/python3", "/var/crash")
    assert len(made) == 2 * len(UNITS)
    for name in UNITS:
        link = folder / "multi-user.target.wants" / name
        assert link.resolve() == folder / name
    service = (folder / "memcg-inspect-crash.service").read_text()
    command = "ExecStart='/opt/my python/bin/python3' -m memcg_inspect crash report /var/crash"
    assert command in service.splitlines()
    assert "ConditionPathExists=!/proc/vmcore" in service
    assert "{" not in service


@pytest.mark.long
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    made = [path for path in install(str(tmp_path), sys.executable) if not path.is_symlink()]
    words = ["systemd-analyze", "verify", "--man=no", *map(str, made)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "memcg-inspect-crash" in line]
    assert lines == []


def test_the_journal_gets_fields(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    outcome = Outcome("/var/crash/1/dump.1", "findings", 2, "a\nb \x1b[31m")
    assert not tell_journal(outcome, path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(path)
        assert tell_journal(outcome, path)
        message = journal.recv(65536)
    fields = {}
    while message:
        name, _, message = message.partition(b"\n")
        (size,) = struct.unpack("<Q", message[:8])
        fields[name.decode()] = message[8 : 8 + size].decode()
        assert message[8 + size : 9 + size] == b"\n"
        message = message[9 + size :]
    assert fields["MEMCG_INSPECT_VERDICT"] == "findings"
    assert fields["MEMCG_INSPECT_DUMP"] == "/var/crash/1/dump.1"
    assert fields["MEMCG_INSPECT_REPORT"] == "/var/crash/1/report.txt"
    assert fields["PRIORITY"] == "4"
    assert "\x1b" not in fields["MESSAGE"]
    assert "memory accounting is findings (2 findings)" in fields["MESSAGE"]


def test_the_message_of_the_day(tmp_path: Path) -> None:
    some = [Outcome(f"/var/crash/{n}/vmcore", "exact", 0, "") for n in range(8)]
    path = tmp_path / "motd"
    write_motd(some, str(path))
    lines = path.read_text().splitlines()
    assert lines[0].startswith("This machine has crashed.")
    assert lines[1] == f"  {sentence(some[0])}"
    assert lines[2] == "    report: /var/crash/0/report.txt"
    assert lines[-1] == "  and 3 more"
