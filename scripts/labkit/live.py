# SPDX-License-Identifier: LGPL-2.1-or-later
"""Run a command of this machine in a guest."""

import os
import shlex
import sys
from pathlib import Path

from . import machine
from .machine import Options

# The variables of the caller's environment that the command gets.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TERM", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONUNBUFFERED")


def _script(command: list[str], mount: str) -> str:
    """Return a script that mounts this machine's files and runs the command in them.

    /proc, /sys and /dev are the guest's.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept["MEMCG_INSPECT_CACHE"] = os.environ.get("MEMCG_INSPECT_CACHE", "")
    assignments = [f"{name}={value}" for name, value in kept.items() if value]
    inner = f"cd {shlex.quote(os.getcwd())}; exec {shlex.join(command)}"
    words = shlex.join(["env", "-i", *assignments, "sh", "-c", inner])
    mounts = "\n".join(
        f"mount --bind {place} /host{place}"
        for place in ("/proc", "/sys", "/dev", *_own_places(command), "/dev/shm")
    )
    # virtio-serial ports take 32 KiB of a write(2) at most, but return success for all of it.
    pipes = "\n".join(
        f"mkfifo /run/live.{fd}\ndd bs=16k </run/live.{fd} >&{fd} 2>/dev/null &" for fd in (1, 2)
    )
    run = f"chroot /host {words} >/run/live.1 2>/run/live.2\nstatus=$?\nwait\nexit $status\n"
    return f"set -e\nmkdir -p /host\n{mount}\n{mounts}\n{pipes}\nset +e\n{run}"


def _own_places(command: list[str]) -> list[str]:
    """Return those of /tmp and /run that the command does not need of this machine."""
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
    """Run `command` as root in a guest, and return its exit status."""
    with machine.booted(options, host_files=True) as running:
        assert running.share is not None
        running.load_modules()
        running.start_workload()
        running.run_script()
        sys.stdout.flush()
        script = _script(command, running.share.mount)
        what = Path(command[0]).name
        return running.guest.sh(script, what=what, timeout=timeout, sink=_forward).status
