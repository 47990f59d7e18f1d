# SPDX-License-Identifier: LGPL-2.1-or-later
"""Programs that the lab runs to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from labkit.errors import LabError
from labkit.run import run
from support.guests import ROOT

INTERRUPTED = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from labkit.run import run
signal.signal(signal.SIGTERM, signal.default_int_handler)
run(["sh", "-c", "sh -c 'echo $$ >pid.new; mv pid.new pid; exec sleep 600'; true"], what="sleep")
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_program_started_ends_with_the_lab(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, ROOT / "scripts"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as lab:
        end = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < end:
            time.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid)
        os.kill(lab.pid, signal.SIGTERM)
        lab.wait(60)
        while is_running(pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_running(pid)


def test_what_a_program_says_is_returned_or_logged(tmp_path: Path) -> None:
    words = ["sh", "-c", "echo said; echo wrong >&2"]
    log = tmp_path / "log"
    assert run(words, what="speak") == "said\n"
    assert run(words, what="speak", log=log) == ""
    assert log.read_text() == "said\nwrong\n"


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_program_that_fails_is_quoted(tmp_path: Path, is_logged: bool) -> None:
    log = tmp_path / "log" if is_logged else None
    with pytest.raises(LabError) as failure:
        run(["sh", "-c", "echo said; echo wrong >&2; exit 3"], what="speak", log=log)
    first, *rest = str(failure.value).splitlines()
    assert first == "speak: sh failed with status 3:"
    assert {"  said", "  wrong"} <= set(rest)
    assert (f"all of the output: {log}" in rest) == is_logged
