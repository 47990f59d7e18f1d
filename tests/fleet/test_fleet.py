# SPDX-License-Identifier: LGPL-2.1-or-later
"""Audits of many dumps: each has one line, whatever happens to it or to the program."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.dask_cluster import cluster
from support.guests import GuestImage, Lab
from support.printed import on_full_disk
from support.schemas import errors
from support.signals import with_interrupts

from memcg_inspect.cli import main
from memcg_inspect.fleet import one, run
from memcg_inspect.fleet.one import failed
from memcg_inspect.fleet.results import line_of
from memcg_inspect.image import dask

pytestmark = pytest.mark.image


@pytest.fixture
def image(lab: Lab) -> GuestImage:
    return lab.image("7.3", "1", "idle")


@pytest.fixture
def dumps(image: GuestImage, tmp_path: Path) -> list[str]:
    """The paths of three dumps that can be read, and of three that cannot."""
    names = [str(tmp_path / name) for name in ("a", "b", "c", "text", "cut", "none")]
    for name in names[:3]:
        os.link(image.core, name) if same_disk(image, tmp_path) else os.symlink(image.core, name)
    Path(names[3]).write_text("no dump\n")
    Path(names[4]).write_bytes(image.core.open("rb").read(5000))
    return names


def same_disk(image: GuestImage, folder: Path) -> bool:
    return image.core.stat().st_dev == folder.stat().st_dev


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


FLEET = ["fleet", "--debuginfo", "btf"]
#: Seconds of a sleep that no other process of the machine sleeps.
NAP = f"1000.{os.getpid()}"


def test_each_dump_has_one_line(dumps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLEET, *dumps, dumps[0]]) == 3
    out, err = capsys.readouterr()
    found = {line["dump"]: line for line in lines(out)}
    assert err == ""
    assert list(found) and sorted(found) == sorted(dumps)
    for name in dumps[:3]:
        line = found[name]
        assert (line["status"], line["verdict"], line["error"]) == (0, "exact", None)
        assert line["release"].startswith("7.3") and line["rows"] > 100
        assert line["host"] == "(none)"  # no one has set it in the guest
    for name in dumps[3:]:
        line = found[name]
        assert (line["status"], line["verdict"]) == (2, None)
        assert name in line["error"]
    for line in found.values():
        assert errors(line) == {}


def test_what_is_done_is_not_done_again(
    dumps: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines of an earlier run count. One that was not finished is written anew."""
    file = tmp_path / "results"
    done = list[str]()

    def audited(options: object, path: str, code: str) -> Any:
        done.append(path)
        return failed(path, 2, "not tried")

    monkeypatch.setattr(run, "audit_dump", audited)
    command = [*FLEET, "-o", str(file)]
    assert main([*command, *dumps[:2]]) == 3
    assert sorted(done) == sorted(dumps[:2])
    with file.open("a") as more:
        more.write(line_of(failed(dumps[2], 2, "half of it"))[:40])
    assert main([*command, *dumps]) == 3
    assert Counter(done) == Counter(dumps)
    assert "6 dumps: 6 not read; 2 had been audited before" in capsys.readouterr().out
    Path(dumps[3]).write_text("another text\n")
    assert main([*command, *dumps]) == 3
    assert Counter(done) == Counter([*dumps, dumps[3]])
    assert main([*command, "--retry", *dumps[:1]]) == 3
    assert done[-1] == dumps[0] and len(lines(file.read_text())) == 8


def test_a_dump_that_was_away_for_a_time(dumps: list[str], tmp_path: Path) -> None:
    """What was said of it before does not stand against what was said last."""
    file, away = tmp_path / "results", Path(dumps[0] + ".away")
    command = [*FLEET, "-o", str(file), dumps[0]]
    assert main(command) == 0
    Path(dumps[0]).rename(away)
    assert main(command) == 3
    away.rename(dumps[0])
    assert main(command) == 0
    assert [line["status"] for line in lines(file.read_text())] == [0, 2, 0]


def test_a_dump_that_changes_while_it_is_read(
    dumps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict would be of one file, and the size of another."""
    known = iter([(1, 2), (1, 3), (1, 3)])
    monkeypatch.setattr(one, "identity_of", lambda path: next(known))
    found = one._audited({"debuginfo": "btf"}, dumps[0])
    assert (found.status, found.verdict) == (2, None)
    assert "was changed while it was read" in (found.error or "")


def test_modules_in_the_current_directory_are_not_run(
    dumps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert main([*FLEET, dumps[0]]) == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["precious", "a\nb\n", '{"schema": 2, "command'])
def test_a_file_of_something_else_is_left_alone(
    text: str, dumps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keep"
    file.write_text(text)
    assert main([*FLEET, "-o", str(file), dumps[5]]) == 2
    assert "line 1 is none of memcg-inspect fleet" in capsys.readouterr().err
    assert file.read_text() == text


def test_a_pipe_is_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To open it would wait for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main([*FLEET, str(pipe)]) == 3
    [line] = lines(capsys.readouterr().out)
    assert "is no regular file" in line["error"]


def test_paths_from_standard_input(
    dumps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (f"{dumps[5]}\n\n{dumps[3]}", f"{dumps[5]}\0{dumps[3]}\0"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main([*FLEET, "-"]) == 3
        assert {line["dump"] for line in lines(capsys.readouterr().out)} == {dumps[3], dumps[5]}


def test_an_audit_that_is_killed_has_a_line(
    dumps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the OOM killer, say. A bug has a line, too."""
    python, kill = sys.executable, "import os; os.kill(os.getpid(), 9)"
    for code, said in ((kill, "ended by SIGKILL"), ("1 / 0", "ZeroDivisionError")):
        program = Path(dumps[0]).with_name("python")
        program.write_text(f'#!/bin/sh\nexec {python} -c "{code}"\n')
        program.chmod(0o700)
        monkeypatch.setattr(one.sys, "executable", str(program))
        assert main([*FLEET, dumps[0]]) == 3
        [line] = lines(capsys.readouterr().out)
        assert line["status"] == 70 and said in line["error"]


def test_an_interrupt_ends_all_audits(dumps: list[str], tmp_path: Path) -> None:
    """What was done before is in the file, and nothing runs on."""
    file = tmp_path / "results"
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *fleet.one*{dumps[0]}) exec sleep {NAP};; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    program.chmod(0o700)
    code = (
        f"import sys; from memcg_inspect.cli import main; sys.executable = {str(program)!r}; "
        f"sys.exit(main({[*FLEET, '--jobs', '2', '-o', str(file), *dumps]!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=with_interrupts,
    )
    while not file.exists() or len(file.read_text().splitlines()) < len(dumps) - 1:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said) == (130, "memcg-inspect: interrupted\n")
    assert len(lines(file.read_text())) == len(dumps) - 1
    running = subprocess.run(["pgrep", "-f", f"sleep {NAP}$"], capture_output=True, check=False)
    assert running.stdout == b""


def test_the_lines_of_two_commands_are_not_mixed(
    dumps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from memcg_inspect.fleet.results import result_file

    file = tmp_path / "results"
    with result_file(str(file)):
        assert main([*FLEET, "-o", str(file), dumps[3]]) == 2
    assert "another memcg-inspect fleet writes to it" in capsys.readouterr().err


def test_a_reader_that_has_gone(dumps: list[str]) -> None:
    """As of ``memcg-inspect fleet ... | head -1``: nothing is audited for nobody."""
    command = [sys.executable, "-m", "memcg_inspect", *FLEET, "--jobs", "1", dumps[0], *dumps[4:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 3


def test_output_that_cannot_be_written(dumps: list[str]) -> None:
    status, said = on_full_disk(*FLEET, dumps[3])
    assert status == 2
    assert said == "memcg-inspect: output cannot be written: No space left on device\n"


def test_no_process_can_be_started(
    dumps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is no fault of the dump, so it has no line."""
    monkeypatch.setattr(one.sys, "executable", "/nowhere/python")
    assert main([*FLEET, dumps[0]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "memcg-inspect: a process cannot be started: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["fleet"], "required: DUMP"),
        (["fleet", "--retry", "x"], "--retry needs -o"),
        (["fleet", "--jobs", "0", "x"], "is not a number from 1"),
        (["fleet", "--jobs", "2", "--dask", "y", "x"], "not allowed with argument"),
        (["-c", "x", "fleet", "x"], "not -c or --qemu"),
        (["fleet", "-o", "/", "x"], "/: Is a directory"),
        (["fleet", "-o", "/dev/null", "x"], "/dev/null is no regular file"),
        (["--jobs", "2", "fleet", "--dask", "y", "x"], "--dask cannot be used with --jobs"),
        (["summary", "/nowhere"], "/nowhere: No such file"),
        (["summary", "--since", "x", "y"], "unrecognized arguments: --since"),
        (["summary", __file__], "line 1 is none of memcg-inspect fleet"),
        (["fleet", "--dask", "tcp://127.0.0.1:1", "x"], "no dask scheduler"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dask, "_TIMEOUT", 1)
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert what in line


def test_a_worker_of_dask_is_killed(
    dumps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No dump is lost, and none has two lines."""
    alone = [*FLEET, *dumps]
    assert main(alone) == 3
    expected = {line["dump"]: without_time(line) for line in lines(capsys.readouterr().out)}
    file = tmp_path / "results"
    with cluster(tmp_path, 2) as made:
        command = [sys.executable, "-m", "memcg_inspect", *FLEET, "--dask", made.address]
        with subprocess.Popen([*command, "-o", str(file), *dumps]) as process:
            while not file.exists() or not file.read_text():
                assert process.poll() is None
                time.sleep(0.01)
            made.kill_one()
            assert process.wait() == 3
    found = lines(file.read_text())
    assert len(found) == len(dumps)
    assert {line["dump"]: without_time(line) for line in found} == expected


def test_the_last_worker_of_dask_is_gone(
    dumps: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """dask would wait for another one without end."""
    monkeypatch.setattr(dask, "_LOOK", 0.2)
    monkeypatch.setattr(run, "_LOOK", 0.2)
    with cluster(tmp_path, 1) as made:
        monkeypatch.setattr(run, "audit_dump", Killer(made.workers[0].pid))
        assert main([*FLEET, "--dask", made.address, dumps[0]]) == 2
    assert "start one, and repeat the command" in capsys.readouterr().err


class Killer:
    """Ends the worker that calls it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> tuple[object, tuple[int, int]]:
        return os.kill, (self.pid, signal.SIGKILL)

    def __call__(self) -> None:
        raise AssertionError("the worker has got this")


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "seconds"}
