# SPDX-License-Identifier: LGPL-2.1-or-later
"""Ctrl-C during a long walk: the report has what was read, and says that it is partial."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.guests import DEBIAN_KERNELS, Lab
from support.schemas import checked
from support.terminals import read_terminal

pytestmark = pytest.mark.image

#: Seconds after which a command hangs, however slow the machine is.
LIMIT = 600
#: Makes the walk wait for the signal at its second piece, and then go on.
WAITING = """
import signal, sys, time
from memcg_inspect.linux.mm import mm_types
found, number = mm_types._Scan.piece, 0
def piece(*args):
    global number
    number += 1
    if number == 2:
        # Blocked until it is pending: however slow the machine is, it is delivered here.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        print("walking", file=sys.stderr, flush=True)
        while signal.SIGINT not in signal.sigpending():
            time.sleep(0.01)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return found(*args)
mm_types._Scan.piece = piece
from memcg_inspect.cli import main
sys.exit(main(sys.argv[1:]))
"""


def interrupted(core: Path, *words: str) -> tuple[int, str, str]:
    """Return exit status, output and messages."""
    command = [sys.executable, "-c", WAITING, "-c", str(core), "--debuginfo", "btf", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "walking\n"
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=LIMIT)
    assert "Traceback" not in said
    return process.returncode, out, said


def statuses(report: dict[str, Any], identity: str) -> set[str]:
    return {row["status"] for row in report["rows"] if row["identity"] == identity}


def test_an_audit(lab: Lab) -> None:
    core = lab.image(DEBIAN_KERNELS[-1], workload="mixed").core
    status, out, _ = interrupted(core, "audit", "--json")
    report = checked(json.loads(out))
    assert (status, report["verdict"], report["interrupted"]) == (130, "incomplete", True)
    assert report["findings"] == []
    assert report["memcgs"]
    assert 0 < report["coverage"]["pages"]["read"] < 262_144
    reasons = {e["reason"] for e in report["coverage"]["pages"]["examples"]}
    assert reasons == {"interrupted before it was read"}
    # what needs pages cannot be told, what does not can
    assert "unverifiable" in statuses(report, "slab")
    assert "exact" in statuses(report, "task_objcg")
    assert all(r["reason"] for r in report["rows"] if r["status"] == "unverifiable")
    assert "in the image" not in out
    assert {"slab memory was not all read (interrupted)"} <= {r["reason"] for r in report["rows"]}


def test_an_audit_for_people(lab: Lab) -> None:
    core = lab.image(DEBIAN_KERNELS[-1], workload="mixed").core
    status, out, _ = interrupted(core, "audit")
    assert status == 130
    assert out.startswith("INCOMPLETE")
    assert "Interrupted: the results are incomplete" in out
    # What was not read was not checked.
    assert re.search(r"Checked: .*\b[\d,]+ of [\d,]+ rows", out), out


@pytest.mark.parametrize("view", ["slabinfo", "dying"])
def test_a_view(lab: Lab, view: str) -> None:
    core = lab.image(DEBIAN_KERNELS[-1], workload="mixed").core
    status, out, _ = interrupted(core, view, "--json")
    answer = checked(json.loads(out))
    assert (status, answer["whole"]) == (130, False)
    assert any(table["rows"] for table in answer["tables"])
    # The dump is complete: only the walk was not.
    assert "in the image" not in out
    assert "dump" not in out


#: As :data:`WAITING`, but the line of progress has a thread of its own, which may get the signal.
#: A shell starts jobs in the background with the signal ignored.
DRAWING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from memcg_inspect.linux.mm import mm_types
found, number = mm_types._Scan.piece, 0
def piece(*args):
    global number
    number += 1
    if number == 2:
        print("walking", file=sys.stderr, flush=True)
        for _ in range(6000):
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                break
            time.sleep(0.01)
    return found(*args)
mm_types._Scan.piece = piece
from memcg_inspect.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_line_of_progress_says_how_to_stop_at_once(lab: Lab) -> None:
    core = lab.image(DEBIAN_KERNELS[-1], workload="mixed").core
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", DRAWING, "-c", str(core), "--debuginfo", "btf", "slabinfo"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "150"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown, is_sent = "", False
        for data in read_terminal(ours):
            shown += data.decode()
            if "walking" in shown and not is_sent:
                process.send_signal(signal.SIGINT)
                is_sent = True
        assert process.wait(timeout=LIMIT) == 130
    os.close(ours)
    assert "interrupted: Ctrl-C again to stop at once" in shown
