# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests that stay: `lab up`, `lab exec`, `lab down`.

A background process, the keeper, is the parent of QEMU. It runs scripts that come through a
socket in the state folder, and ends QEMU when it gets SIGTERM.
"""

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from . import dump, freeze, machine
from .errors import LabError
from .machine import Machine, Options
from .store import write_atomically

_STATE = "state.json"
_LEAST_TIMEOUT = 30.0


def _state(folder: Path) -> dict[str, Any]:
    # The path of the QMP socket is accepted in place of its folder.
    folder = folder.parent if folder.name == "qmp" else folder
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_bytes())
    except (OSError, ValueError):
        raise LabError(f"no guest is kept in {folder}") from None
    return state


def _alive(pid: int, began: str) -> bool:
    """Return whether the process with this pid is the one that began at this time."""
    return _began(pid) == began


def _began(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        # proc(5): field 22, starttime. Field 2, the name, may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return ""


def up(options: Options, how: str, folder: Path) -> Path:
    """Boot a guest that stays, and return the path of its QMP socket."""
    folder = folder.absolute()
    if (folder / _STATE).exists():
        state = _state(folder)
        if _alive(state["pid"], state["began"]):
            raise LabError(f"{folder} keeps a guest already; end it with: lab down {folder}")
    if how == "settled":
        dump.check(options, dump.Image(how))
    machine.check(options)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("qmp", "ctl", _STATE):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "guest", ignore_errors=True)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        _keeper(options, how, folder, sender)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        said = pipe.read()
    if said != "ready":
        os.waitpid(pid, 0)
        raise LabError(said or "the guest's keeper ended early")
    return folder / "qmp"


def _keeper(options: Options, how: str, folder: Path, sender: int) -> None:
    """Run as the keeper of a guest. Does not return."""
    os.setsid()
    status = 0

    def tell(text: str) -> None:
        os.write(sender, text.encode())
        os.close(sender)

    def ended(_signal: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, ended)
    try:
        _keep(options, how, folder, tell)
    except SystemExit:
        pass
    except LabError as error:
        status = 1
        with contextlib.suppress(OSError):
            tell(str(error))
    finally:
        for name in (_STATE, "qmp", "ctl"):
            (folder / name).unlink(missing_ok=True)
        os._exit(status)


def _keep(options: Options, how: str, folder: Path, tell: Any) -> None:
    extra = ["-qmp", f"unix:{folder / 'qmp'},server=on,wait=off"]
    with machine.booted(options, extra_args=extra) as running:
        running.load_modules()
        running.start_workload()
        running.run_script()
        if how == "settled":
            freeze.settled(running, folder / "guest")
        elif how == "busy":
            freeze.busy(running, None)
        state = {
            "pid": os.getpid(),
            "began": _began(os.getpid()),
            "kernel": running.kernel.name,
            "vmlinux": str(running.kernel.vmlinux),
            "qmp": str(folder / "qmp"),
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "ctl"))
            listener.listen(4)
            write_atomically(folder / _STATE, json.dumps(state).encode())
            tell("ready")
            # A reader of the output of `lab up` waits until all copies of it are closed.
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            _serve(running, listener)


def _serve(running: Machine, listener: socket.socket) -> None:
    listener.settimeout(1.0)
    while running.qemu.process.poll() is None:
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            continue
        with connection, connection.makefile("rwb") as stream:
            request = json.loads(stream.readline())
            answer: dict[str, Any]
            try:
                done = running.guest.sh(
                    request["script"], what="lab exec", timeout=request["timeout"]
                )
                answer = {
                    "status": done.status,
                    "out": base64.b64encode(done.out).decode(),
                    "err": base64.b64encode(done.err).decode(),
                }
            except LabError as error:
                answer = {"error": str(error)}
            with contextlib.suppress(OSError):
                stream.write(json.dumps(answer).encode() + b"\n")
                stream.flush()


def execute(folder: Path, script: str, timeout: float = _LEAST_TIMEOUT) -> tuple[int, bytes, bytes]:
    """Run a shell script in a guest that is up and not frozen; return (status, out, err)."""
    _state(folder)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(folder.absolute() / "ctl"))
        except OSError as error:
            raise LabError(f"the guest in {folder} does not answer: {error.strerror}") from None
        with connection.makefile("rwb") as stream:
            stream.write(json.dumps({"script": script, "timeout": timeout}).encode() + b"\n")
            stream.flush()
            answer = json.loads(stream.readline() or b'{"error": "the guest is gone"}')
    if "error" in answer:
        raise LabError(answer["error"])
    return answer["status"], base64.b64decode(answer["out"]), base64.b64decode(answer["err"])


def down(folder: Path) -> None:
    """End a guest that `up` booted."""
    state = _state(folder)
    pid, began = state["pid"], state["began"]
    if _alive(pid, began):
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + 20
    while _alive(pid, began) and _running(pid):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            raise LabError(f"the guest's keeper {pid} had to be killed")
        time.sleep(0.05)
    sys.stdout.flush()


def _running(pid: int) -> bool:
    # A zombie has ended: its parent has not waited for it yet.
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
