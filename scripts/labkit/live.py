# SPDX-License-Identifier: LGPL-2.1-or-later
"""Running a command of this machine inside a guest."""

import os
import shlex
import sys
from pathlib import Path

from . import machine
from .machine import Options

# what a command sees of the caller's environment
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TERM", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONUNBUFFERED")


def _script(command: list[str], mount: str) -> str:
    """Mount this machine's files, put the guest's own on top, and run the command."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept["MEMCG_INSPECT_CACHE"] = os.environ.get("MEMCG_INSPECT_CACHE", "")
    assignments = [f"{name}={value}" for name, value in kept.items() if value]
    inner = f"cd {shlex.quote(os.getcwd())}; exec {shlex.join(command)}"
    words = shlex.join(["env", "-i", *assignments, "sh", "-c", inner])
    mounts = "\n".join(
        f"mount --bind {place} /host{place}"
        for place in ("/proc", "/sys", "/dev", *_own_places(command), "/dev/shm")
    )
    # the ports take 32 KiB of a write, and say that they took all of it
    pipes = "\n".join(
        f"mkfifo /run/live.{fd}\ndd bs=16k </run/live.{fd} >&{fd} 2>/dev/null &" for fd in (1, 2)
    )
    run = f"chroot /host {words} >/run/live.1 2>/run/live.2\nstatus=$?\nwait\nexit $status\n"
    return f"set -e\nmkdir -p /host\n{mount}\n{mounts}\n{pipes}\nset +e\n{run}"


def _own_places(command: list[str]) -> list[str]:
    """Folders that the guest has of its own, where the command does not come from there."""
    needed = [os.getcwd(), *command]
    return [
        place
        for place in ("/tmp", "/run")
        if not any(word.startswith(f"{place}/") for word in needed)
    ]


def _forward(name: str, data: bytes) -> None:
    stream = sys.stdout if name == "out" else sys.stderr
    stream.buffer.write(data)
    stream.buffer.flush()


def live(options: Options, command: list[str], *, timeout: float | None = None) -> int:
    """Run `command` as root in a guest; returns its exit status."""
    with machine.booted(options, host_files=True) as running:
        assert running.share is not None
        running.load_modules()
        running.start_workload()
        running.run_script()
        sys.stdout.flush()
        script = _script(command, running.share.mount)
        what = Path(command[0]).name
        return running.guest.sh(script, what=what, timeout=timeout, sink=_forward).status
