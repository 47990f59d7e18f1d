# SPDX-License-Identifier: LGPL-2.1-or-later
"""Guests that crash: what kexec, the crash kernel and makedumpfile save."""

import shlex
from pathlib import Path

from . import initramfs, kdump
from .kernels import Kernel
from .machine import Machine
from .programs import GUEST, compiled
from .topology import Topology

# reserved by the crashing kernel
APPEND = "crashkernel=192M"
_DRIVERS = ["virtio_pci", "virtio_console"]
_COMMAND_LINE = (
    "console=ttyS0 loglevel=4 nr_cpus=1 irqpoll reset_devices panic=-1 rdinit=/init "
    # the memory is little, and nothing of it is needed for memcgs
    "cgroup_disable=memory"
)
_TIMEOUT = 600.0


def files(kernel: Kernel) -> dict[str, bytes]:
    """What the guest needs to load a crash kernel."""
    archive = initramfs.base(kernel, init="crash-init", drivers=_DRIVERS)
    for path, data in kdump.program_and_libraries().items():
        archive.file(path, data, 0o755)
    return {
        "lab/bin/kexec-crash": compiled(GUEST / "kexec-crash.c"),
        "lab/crash/bzImage": kernel.bzimage.read_bytes(),
        "lab/crash/initrd": archive.finish(),
    }


def enough_memory(topology: Topology) -> str:
    """A memory size with which a node has room for what is reserved."""
    return f"{max(1024, 384 * len(topology.nodes))}M"


def _save_command(format: str, level: int) -> str:
    if format == "kdump":
        return f"makedumpfile -F -c -d {level} /proc/vmcore"
    return f"makedumpfile -F -E -d {level} /proc/vmcore" if level else "cat /proc/vmcore"


def load(machine: Machine, format: str, level: int) -> None:
    """Load the crash kernel into the memory reserved for it."""
    # the command reaches the crash kernel's init as a word of its command line
    save = _save_command(format, level).replace(" ", "@")
    line = f"{_COMMAND_LINE} lab.save={save}"
    machine.guest.must(
        f"exec kexec-crash /lab/crash/bzImage /lab/crash/initrd {shlex.quote(line)}",
        what="loading the crash kernel",
    )


def crash(machine: Machine, out: Path, *, flattened: bool) -> None:
    """Crash the guest, and write to `out` what its crash kernel sends."""
    guest = machine.guest
    what = "crashing the guest and saving its memory"
    with machine.timed("crash", what), open(out, "wb") as file:
        sink = kdump.Flattened(file) if flattened else kdump.Plain(file)
        guest.crash()
        status = guest.receive(sink.feed, timeout=_TIMEOUT, what="saving the crashed memory")
        # an error of makedumpfile's tells more than the stream it cut short
        if status == 0:
            sink.finish()
    if status != 0:
        raise guest.fail(f"saving the crashed memory failed with status {status}")
