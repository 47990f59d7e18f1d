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
from support.schemas import errors

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

    def audited(options: object, path: str) -> Any:
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


def test_paths_from_standard_input(
    dumps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{dumps[5]}\n\n{dumps[3]}"))
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
        f'#!/bin/sh\ncase "$*" in *fleet.one*{dumps[0]}) exec sleep 1000;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    program.chmod(0o700)
    code = (
        f"import sys; from memcg_inspect.cli import main; sys.executable = {str(program)!r}; "
        f"sys.exit(main({[*FLEET, '--jobs', '2', '-o', str(file), *dumps]!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not file.exists() or len(file.read_text().splitlines()) < len(dumps) - 1:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said) == (130, "memcg-inspect: interrupted\n")
    assert len(lines(file.read_text())) == len(dumps) - 1
    running = subprocess.run(["pgrep", "-f", "sleep 1000"], capture_output=True, check=False)
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
    command = [sys.executable, "-m", "memcg_inspect", *FLEET, "--jobs", "1", *dumps[3:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 3


def test_output_that_cannot_be_written(dumps: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "memcg_inspect", *FLEET, dumps[3]],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "memcg-inspect: output cannot be written: No space left on device\n"


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
        (["summary", "/nowhere"], "/nowhere: No such file"),
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


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "seconds"}
