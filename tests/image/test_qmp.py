# SPDX-License-Identifier: LGPL-2.1-or-later
"""The monitor of a real QEMU that another client holds, and of one that does not answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from memcg_inspect.cli import main
from memcg_inspect.image.program import ImageSource, open_program
from memcg_inspect.image.qmp import Monitor
from memcg_inspect.model import ImageError

QEMU = "qemu-system-x86_64"
BUSY = "QEMU serves one client of a monitor at a time, and another one, such as libvirt, may be"


class Machine:
    """A QEMU without a machine, which is up at once, and its QMP socket."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "qmp"
        monitor = f"unix:{self.path},server=on,wait=off"
        self.process = subprocess.Popen(
            [QEMU, "-machine", "none", "-nodefaults", "-display", "none", "-qmp", monitor]
        )
        end = time.monotonic() + 60
        while not self.path.exists():
            assert time.monotonic() < end
            assert self.process.poll() is None
            time.sleep(0.02)

    def client(self) -> socket.socket:
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(60)
        found.connect(str(self.path))
        return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("qemu"))
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.parametrize("more", [[], ["--pause"]])
def test_another_client_holds_the_monitor(
    machine: Machine, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with machine.client() as other:
        assert b"QMP" in other.recv(4096)
        assert main(["audit", "--qemu", str(machine.path), "--timeout", "0.3", *more]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith(f"memcg-inspect: {machine.path}: no greeting of QEMU within 0.3 s: ")
    assert BUSY in said
    assert "-qmp unix:PATH,server=on,wait=off" in said
    assert said.count("\n") == 1


def test_more_clients_wait_than_qemu_lets_wait(machine: Machine) -> None:
    """One more cannot connect at all."""
    with ExitStack() as waiting:
        with suppress(BlockingIOError):
            for _ in range(1000):
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(machine.path))
        with pytest.raises(ImageError, match=BUSY):
            Monitor(str(machine.path), timeout=0.2)


def wait_until_stopped(pid: int) -> None:
    """The signal takes its time: a thread may accept a client, and greet it, meanwhile."""
    end, tasks = time.monotonic() + 60, Path(f"/proc/{pid}/task")
    states = {"R"}
    while states != {"T"}:
        assert time.monotonic() < end
        time.sleep(0.01)
        texts = [(task / "stat").read_text() for task in tasks.iterdir()]
        states = {text.rpartition(")")[2].split()[0] for text in texts}


def test_qemu_that_is_stopped(machine: Machine) -> None:
    os.kill(machine.process.pid, signal.SIGSTOP)
    try:
        wait_until_stopped(machine.process.pid)
        with pytest.raises(ImageError, match=BUSY):
            open_program(ImageSource(qemu=str(machine.path), timeout=0.2))
    finally:
        os.kill(machine.process.pid, signal.SIGCONT)


def test_the_other_client_goes(machine: Machine) -> None:
    """The greeting arrives in time. This machine has no kernel, so drgn opens it in vain."""
    with pytest.raises(ImageError) as error:
        open_program(ImageSource(qemu=str(machine.path), timeout=60))
    assert BUSY not in str(error.value)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-c", "/vmcore", "--timeout", "1"], "--timeout needs --qemu"),
        (["--qemu", "/qmp", "--timeout", "-1"], "--timeout takes 0 to 3600 seconds"),
        (["--qemu", "/qmp", "--timeout", "nan"], "--timeout takes 0 to 3600 seconds"),
    ],
)
def test_wrong_arguments(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *words]) == 2
    assert why in capsys.readouterr().err
