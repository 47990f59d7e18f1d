# SPDX-License-Identifier: LGPL-2.1-or-later
"""Stopping a guest: where it rests, or in full flight."""

import io
import random
import tarfile
import time
from pathlib import Path

from .errors import LabError
from .machine import Machine

_APART = 3.0
_QUIET_TRIES = 200


def record(machine: Machine, folder: Path) -> None:
    """Keep in `folder` what the guest says about itself now."""
    data = machine.guest.must("exec record", what="recording the guest's own files")
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            # made by our own program, but read from a guest all the same
            path = Path(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts:
                raise LabError(f"the guest's record holds {member.name!r}")
            content = archive.extractfile(member)
            assert content is not None
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())


def settled(machine: Machine, told: Path) -> None:
    """Record the guest's own files twice, then stop it while every CPU is idle."""
    with machine.timed("settle", "waiting until the guest rests"):
        record(machine, told / "1")
        time.sleep(_APART)
        record(machine, told / "2")
        machine.guest.must("sync", what="sync")
        time.sleep(0.3)
        monitor = machine.qemu.monitor
        for _ in range(_QUIET_TRIES):
            monitor.call("stop")
            if monitor.halted():
                return
            monitor.call("cont")
            time.sleep(0.02)
    raise machine.guest.fail("the guest did not come to rest")


def let_run(seed: int | None) -> None:
    """Wait for a random moment, half a second to two seconds away."""
    time.sleep(random.Random(seed).uniform(0.5, 2.0))


def busy(machine: Machine, seed: int | None) -> None:
    """Stop the guest at some moment, whatever it is doing."""
    with machine.timed("busy", "letting the guest run"):
        let_run(seed)
        machine.qemu.monitor.call("stop")
