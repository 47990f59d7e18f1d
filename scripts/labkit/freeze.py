# SPDX-License-Identifier: LGPL-2.1-or-later
"""Stop a guest: when it is idle, or at a random moment."""

import io
import random
import tarfile
import time
from pathlib import Path

from .errors import LabError
from .machine import Machine

# Seconds between the two records, which differ by what is still moving.
_APART = 3.0
_QUIET_TRIES = 200


def record(machine: Machine, folder: Path) -> None:
    """Save the guest's own files (/proc, /sys, cgroups) in `folder`, as they are now."""
    data = machine.guest.must("exec record", what="record the guest's own files")
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            # fixtures/guest/record.c wrote the archive, but a guest is not trusted.
            path = Path(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts:
                raise LabError(f"the guest's record holds an unsafe name: {member.name!r}")
            content = archive.extractfile(member)
            assert content is not None
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())


def settled(machine: Machine, told: Path) -> None:
    """Record the guest's own files twice, then stop it while every CPU is idle."""
    with machine.timed("settle", "wait until the guest is idle"):
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
    raise machine.guest.fail("the guest did not become idle")


def let_run(seed: int | None) -> None:
    """Wait for a random time of 0.5 to 2 seconds, chosen by `seed`."""
    time.sleep(random.Random(seed).uniform(0.5, 2.0))


def busy(machine: Machine, seed: int | None) -> None:
    """Stop the guest at a random moment, whatever it is doing."""
    with machine.timed("busy", "let the guest run"):
        let_run(seed)
        machine.qemu.monitor.call("stop")
