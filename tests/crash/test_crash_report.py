# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports beside dumps, in the layouts of distributions; the units that make them; who is told."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.guests import Lab

from memcg_inspect.crash.dumps import dumps_below, report_name
from memcg_inspect.crash.one import Outcome, report_on
from memcg_inspect.crash.told import sentence, tell_journal, write_motd
from memcg_inspect.crash.units import UNITS, install
from memcg_inspect.files import write_beside
from memcg_inspect.model import MemcgInspectError


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
    found = dumps_below(str(tmp_path))
    assert [str(path.relative_to(tmp_path)) for path in found.dumps] == wanted[::-1]
    assert found.newest == (wanted + others).index("202611260216/vmcore-incomplete")
    assert found.others == []


def test_what_others_can_change_is_left_alone(tmp_path: Path) -> None:
    """Links, dumps of other users, and dumps in directories of theirs, as on Ubuntu."""
    names = ("link", "owner", "folder", "open", "sticky", "twice")
    dumps = {name: tmp_path / name / "vmcore" for name in names}
    for dump in dumps.values():
        dump.parent.mkdir()
        dump.write_bytes(b"x")
    dumps["link"].unlink()
    dumps["link"].symlink_to("/etc/passwd")
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop/vmcore").symlink_to("vmcore")
    os.chown(dumps["owner"], 65534, 65534)
    os.chown(dumps["folder"].parent, 65534, 65534)
    dumps["open"].parent.chmod(0o777)
    dumps["sticky"].parent.chmod(0o1777)
    os.link(dumps["twice"], tmp_path / "secret")
    found = dumps_below(str(tmp_path))
    assert found.dumps == [dumps["sticky"]]
    assert set(found.others) == {dumps[name] for name in ("owner", "folder", "open", "twice")}
    status, said, error = run("report", str(tmp_path))
    assert status == 3
    assert [line.partition(": ")[0] for line in said.splitlines()] == [str(dumps["sticky"])]
    assert error.count("is left out: others can change it") == 4


def test_a_report_goes_through_no_link(tmp_path: Path) -> None:
    """Nor is it for more eyes than the dump."""
    dump, secret = tmp_path / "vmcore", tmp_path / "secret"
    dump.write_bytes(b"x")
    dump.chmod(0o400)
    os.chown(dump, 65534, 65534)
    secret.write_text("secret")
    (tmp_path / "report.txt").symlink_to(secret)
    write_beside(dump, "report.txt", "text")
    assert secret.read_text() == "secret"
    found = (tmp_path / "report.txt").lstat()
    assert (found.st_mode, found.st_uid) == (0o100400, 65534)
    assert sorted(os.listdir(tmp_path)) == ["report.txt", "secret", "vmcore"]
    (tmp_path / "way").symlink_to(tmp_path)
    with pytest.raises(MemcgInspectError, match="Not a directory"):
        write_beside(tmp_path / "way/vmcore", "report.txt", "text")


def test_dumps_that_share_a_directory(tmp_path: Path) -> None:
    dump = tmp_path / "dump.202611260212"
    dump.write_bytes(b"x")
    assert report_name(dump, "txt") == "report.txt"
    (tmp_path / "vmcore").write_bytes(b"x")
    assert report_name(dump, "txt") == "dump.202611260212.report.txt"
    assert report_name(tmp_path / "core", "html") == "core.report.html"


def test_dumps_that_change_are_waited_for(tmp_path: Path) -> None:
    dump = tmp_path / "vmcore"
    dump.write_bytes(b"x")
    before = time.monotonic()
    status, said, _ = run("report", "--settle", "2", str(tmp_path))
    assert (status, len(said.splitlines())) == (3, 1)
    assert time.monotonic() - before > 1.5
    os.utime(dump, (0, 0))
    run("report", "--again", "--settle", "3600", str(tmp_path))


@pytest.mark.image
def test_a_report_is_written_once(lab: Lab, tmp_path: Path) -> None:
    core = lab.image("7.3", "2", "files").core
    first, second, third = (tmp_path / f"20261126021{n}" for n in range(3))
    for folder in (first, second, third):
        folder.mkdir()
    copy = first / "dump.202611260210"
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", core, copy], check=True)
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
    assert not (tmp_path / "report.html").exists()


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
        (["report", "--settle", "-1"], "'-1' is not a number from 0 to 3,600"),
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
        made = install(str(tmp_path), "/opt/my 100% $py/\\bin/python3", "/var/crash")
    assert len(made) == 2 * len(UNITS)
    for name in UNITS:
        link = folder / "multi-user.target.wants" / name
        assert link.resolve() == folder / name
    service = (folder / "memcg-inspect-crash.service").read_text()
    words = "-m memcg_inspect crash report --settle 60 /var/crash"
    command = f'ExecStart="/opt/my 100%% $$py/\\\\bin/python3" {words}'
    assert command in service.splitlines()
    assert "SuccessExitStatus=1 3" in service.splitlines()
    assert "ConditionPathExists=!/proc/vmcore" in service
    assert "{" not in service


def test_units_go_where_they_belong(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = root / "etc/systemd/system"
    folder.mkdir(parents=True)
    (folder / "memcg-inspect-crash.service").symlink_to("/dev/null")
    with pytest.raises(MemcgInspectError, match="is a link: it is masked"):
        install(str(root), "/usr/bin/python3")
    (folder / "memcg-inspect-crash.service").unlink()
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    with pytest.raises(MemcgInspectError, match="leads out of"):
        install(str(root), "/usr/bin/python3")


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
    assert fields["MEMCG_INSPECT_REPORT"] == "/var/crash/1/dump.1.report.txt"
    assert fields["PRIORITY"] == "4"
    assert "\x1b" not in fields["MESSAGE"]
    assert "memory accounting is findings (2 findings)" in fields["MESSAGE"]


def test_the_message_of_the_day(tmp_path: Path) -> None:
    some = [Outcome(f"/var/crash/{n}/vmcore", "exact", 0, "") for n in range(8)]
    path = tmp_path / "motd"
    write_motd(some, str(path))
    lines = path.read_text().splitlines()
    assert lines[0] == "memcg-inspect has looked at new crash dumps:"
    assert lines[1] == f"  {sentence(some[0])}"
    assert lines[2] == "    report: /var/crash/0/vmcore.report.txt"
    assert lines[-1] == "  and 3 more"
