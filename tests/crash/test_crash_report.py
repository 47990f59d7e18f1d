# SPDX-License-Identifier: LGPL-2.1-or-later
"""Reports beside dumps, in the layouts of distributions; the units that make them; who is told."""

from __future__ import annotations

import fcntl
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
from support.guests import ROOT, Lab

from memcg_inspect.crash.dumps import arriving, dumps_below
from memcg_inspect.crash.one import Outcome, report_on
from memcg_inspect.crash.reports import ReportFiles
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
    assert found.others == []


def test_what_others_can_change_is_left_alone(tmp_path: Path) -> None:
    """Links, dumps of other users, and dumps in directories of theirs, as on Ubuntu."""
    names = ("link", "owner", "folder", "open", "sticky", "twice", "group", "root")
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
    os.chown(dumps["group"].parent, 0, 1)
    dumps["group"].parent.chmod(0o775)
    dumps["root"].parent.chmod(0o775)
    found = dumps_below(str(tmp_path))
    assert set(found.dumps) == {dumps["sticky"], dumps["root"]}
    others = {dumps[name] for name in ("owner", "folder", "open", "twice", "group")}
    assert set(found.others) == others
    status, said, error = run("report", str(tmp_path))
    assert status == 3
    named = {line.partition(": ")[0] for line in said.splitlines()}
    assert named == {str(dumps["sticky"]), str(dumps["root"])}
    assert error.count("is left out: others can change it") == 5
    # What is left out is no success, also if there is nothing else to do.
    assert run("report", str(tmp_path))[0] == 3


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
    """A dump that has a report has one, whatever comes after it."""
    dump, other = tmp_path / "dump.202611260212", tmp_path / "vmcore"
    dump.write_bytes(b"x")
    assert ReportFiles(dump).text.name == "report.txt"
    assert run("report", str(tmp_path))[1].startswith(f"{dump}: no report")
    other.write_bytes(b"x")
    assert ReportFiles(dump).text.name == "dump.202611260212.report.txt"
    assert ReportFiles(tmp_path / "core").text.name == "core.report.txt"
    said = run("report", str(tmp_path))[1]
    assert [line.partition(": ")[0] for line in said.splitlines()] == [str(other)]
    assert run("report", str(tmp_path)) == (0, "", "")
    names = {path.name for path in tmp_path.glob("*.txt")}
    assert names == {"report.txt", "vmcore.report.txt"}


def test_what_is_no_report(tmp_path: Path) -> None:
    """Links, files of others, reports on other dumps, and those on what the dump was before."""
    dump, text = tmp_path / "vmcore", tmp_path / "report.txt"
    dump.write_bytes(b"x")
    files = ReportFiles(dump)
    assert files.state() == "none"
    files.write("txt", "EXACT")
    assert files.state() == "done"
    os.utime(dump, (1 << 33, 1 << 33))  # a clock that was ahead
    assert files.state() == "done"
    later = text.stat().st_mtime + 0.001
    os.utime(dump, (later, later))
    time.sleep(0.01)
    assert files.state() == "none"
    files.write("txt", "EXACT")
    os.chown(text, 65534, 65534)
    assert files.state() == "none"
    text.rename(tmp_path / "elsewhere")
    text.symlink_to(tmp_path / "elsewhere")
    assert files.state() == "none"
    text.unlink()
    os.mkfifo(text)
    assert files.state() == "none"
    text.unlink()
    (tmp_path / "vmcore.flat").write_bytes(b"x")
    other = ReportFiles(tmp_path / "vmcore.flat")
    other.prefix = "report"
    other.write("txt", "EXACT")
    assert files.state() == "none"


def slept(seconds: float) -> None:
    time.sleep(min(seconds, 0.1))


def test_dumps_that_change_are_waited_for(tmp_path: Path) -> None:
    """By themselves: neither the clock, nor files of others, nor unfinished dumps matter."""
    dump = tmp_path / "vmcore"
    dump.write_bytes(b"x")
    (tmp_path / "dump-incomplete").write_bytes(b"x")
    for seconds in (time.time(), time.time() + 9999, 1 << 33):
        os.utime(dump, (seconds, seconds))
        before = time.monotonic()
        assert list(arriving(str(tmp_path), 0.5, lambda path: True, slept)) == [dump]
        assert 0.4 < time.monotonic() - before < 5
    os.utime(dump, (0, 0))
    assert next(arriving(str(tmp_path), 3600, lambda path: True)) == dump


def test_a_dump_that_never_rests_is_left_for_later(tmp_path: Path) -> None:
    dump, other = tmp_path / "vmcore", tmp_path / "one/vmcore"
    other.parent.mkdir()
    other.write_bytes(b"x")
    os.utime(other, (0, 0))

    def grow(seconds: float) -> None:
        dump.write_bytes(dump.read_bytes() + b"x")
        slept(seconds)

    dump.write_bytes(b"x")
    assert list(arriving(str(tmp_path), 0.2, lambda path: True, grow)) == [other]


def test_dumps_that_arrive_meanwhile(tmp_path: Path) -> None:
    first, second = tmp_path / "1/vmcore", tmp_path / "2/vmcore"
    first.parent.mkdir()
    first.write_bytes(b"x")
    found = arriving(str(tmp_path), 0, lambda path: True)
    assert next(found) == first
    second.parent.mkdir()
    second.write_bytes(b"x")
    assert list(found) == [second]


def test_code_in_the_current_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("open('run', 'w')\nraise SystemExit(9)\n")
    (tmp_path / "vmcore").write_bytes(b"x")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from memcg_inspect.cli import main; "
    code += "sys.exit(main(['crash', 'report', '.']))"
    words = [sys.executable, "-I", "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "is neither an ELF core nor a dump" in done.stdout
    assert not (tmp_path / "run").exists()


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
    assert text.splitlines()[-1] == "Dump: dump.202611260210"
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
    assert report_on(dump, {}) == Outcome(str(dump), None, 0, why, str(tmp_path / "report.txt"))
    assert ReportFiles(dump).state() == "done"
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
        "The audit of this dump has begun. If it does not end, repeat it:\n"
        f"    memcg-inspect crash report --again {dump}\n\nDump: vmcore\n"
    )


def test_an_audit_that_an_earlier_boot_began(tmp_path: Path) -> None:
    """It is told once, and not tried again unless that is asked for."""
    dump = tmp_path / "vmcore"
    dump.write_bytes(b"x")
    ReportFiles(dump).begin()
    status, said, _ = run("report", str(tmp_path))
    assert status == 3
    assert said.startswith(f"{dump}: no report: an earlier audit of it did not end")
    assert run("report", str(tmp_path)) == (0, "", "")
    assert "neither an ELF core" in run("report", "--again", str(tmp_path))[1]


def test_an_audit_that_is_told_to_end_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, python = tmp_path / "vmcore", tmp_path / "python"
    dump.write_bytes(b"x")
    python.write_text("#!/bin/sh\nkill -TERM $PPID; sleep 60\n")
    python.chmod(0o755)
    code = f"import sys; sys.executable = {str(python)!r}; from memcg_inspect.cli import main; "
    code += f"sys.exit(main(['crash', 'report', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=50)
    assert done.returncode == 143
    assert sorted(os.listdir(tmp_path)) == ["python", "vmcore"]


def test_one_process_audits_a_dump(tmp_path: Path) -> None:
    dump = tmp_path / "vmcore"
    dump.write_bytes(b"x")
    with dump.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert report_on(dump, {}) is None
        assert run("report", str(tmp_path)) == (0, "", "")
    assert os.listdir(tmp_path) == ["vmcore"]


def test_a_report_that_finds_no_room(tmp_path: Path) -> None:
    """What was found is told all the same, and nothing wrong is left."""
    dump = tmp_path / "vmcore"
    dump.write_bytes(b"x")
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40)); "
    code += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code += (
        f"from memcg_inspect.cli import main; sys.exit(main(['crash', 'report', {str(dump)!r}]))"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert "neither an ELF core" in done.stdout
    assert "the report could not be written" in done.stdout
    assert os.listdir(tmp_path) == ["vmcore"]


def test_files_that_cannot_be_given_away(tmp_path: Path) -> None:
    """A service without CAP_CHOWN: the report has no group that is not the dump's."""
    dump = tmp_path / "vmcore"
    dump.write_bytes(b"x")
    dump.chmod(0o640)
    os.chown(dump, 0, 4)
    caps = ["setpriv", "--bounding-set", "-chown", "--inh-caps", "-chown"]
    words = [*caps, sys.executable, "-m", "memcg_inspect", "crash", "report", str(dump)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    found = (tmp_path / "report.txt").stat()
    assert (found.st_mode & 0o777, found.st_gid) == (0o600, 0)
    assert run("report", "--again", str(dump))[0] == 3
    found = (tmp_path / "report.txt").stat()
    assert (found.st_mode & 0o777, found.st_gid) == (0o640, 4)


def test_what_is_no_dump(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dump").write_bytes(b"x")
    (tmp_path / "dump").chmod(0o600)
    (tmp_path / "way").symlink_to(tmp_path / "dump")
    for name in (str(tmp_path / "pipe"), "/dev/null"):
        status, said, error = run("report", name)
        assert (status, said) == (2, "")
        assert error == f"memcg-inspect: {name} is neither a file nor a directory\n"
    assert run("report", str(tmp_path / "way"))[0] == 3
    assert (tmp_path / "dump.report.txt").stat().st_mode & 0o777 == 0o600


def test_an_output_that_is_full_stops_nothing(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vmcore").write_bytes(b"x")
    words = [sys.executable, "-m", "memcg_inspect", "crash", "report", str(tmp_path)]
    with open("/dev/full", "wb") as full:
        assert subprocess.run(words, stdout=full, check=False, timeout=60).returncode == 3
    assert all((tmp_path / name / "report.txt").exists() for name in ("1", "2"))


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
    links = {path for path in made if path.is_symlink()}
    assert {str(path.relative_to(folder)) for path in links} == {
        "timers.target.wants/memcg-inspect-crash.timer",
        "paths.target.wants/memcg-inspect-crash.path",
    }
    assert {link.resolve() for link in links} <= set(made)
    assert {path.name for path in set(made) - links} == set(UNITS)
    service = (folder / "memcg-inspect-crash.service").read_text()
    words = "-m memcg_inspect crash report --settle 60 /var/crash"
    command = f'ExecStart="/opt/my 100%% $$py/\\\\bin/python3" {words}'
    assert command in service.splitlines()
    assert "SuccessExitStatus=1 3 143" in service.splitlines()
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
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MemcgInspectError, match="leads out of"):
        install(str(root), "/usr/bin/python3")
    assert os.listdir(tmp_path) == ["root"]


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
    report = "/var/crash/1/dump.1.report.txt"
    outcome = Outcome("/var/crash/1/dump.1", "findings", 2, "a\nb \x1b[31m", report)
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
    some = [
        Outcome(f"/var/crash/{n}/vmcore", "exact", 0, "", f"/var/crash/{n}/report.txt")
        for n in range(8)
    ]
    path = tmp_path / "motd"
    write_motd(some[1:2], str(path))
    title, *first = path.read_text().splitlines()
    assert title == "memcg-inspect has looked at new crash dumps:"
    assert first == [f"  {sentence(some[1])}", "    report: /var/crash/1/report.txt"]
    # A later run in the same boot takes nothing away.
    write_motd([some[0]._replace(report=None)], str(path))
    assert path.read_text().splitlines() == [title, f"  {sentence(some[0])}", *first]
    write_motd([some[1]._replace(verdict="findings", findings=2)], str(path))
    lines = path.read_text().splitlines()
    assert [line.count("/vmcore: ") for line in lines] == [0, 1, 0, 1]
    assert "findings (2 findings)" in lines[1]
    write_motd(some, str(path))
    lines = path.read_text().splitlines()
    assert (len(lines), lines[-1]) == (12, "  and others: journalctl -t memcg-inspect")
    write_motd(some[:1], str(path))
    lines = path.read_text().splitlines()
    assert (len(lines), lines[-1]) == (12, "  and others: journalctl -t memcg-inspect")
