# SPDX-License-Identifier: LGPL-2.1-or-later
"""Crash a guest, and save its memory with kexec, a crash kernel and makedumpfile."""

import shlex
from pathlib import Path

from . import initramfs, kdump
from .kernels import Kernel
from .machine import Machine
from .programs import GUEST, compiled
from .topology import Topology

# Memory that the first kernel reserves for the crash kernel.
APPEND = "crashkernel=192M"
_DRIVERS = ["virtio_pci", "virtio_console"]
_COMMAND_LINE = (
    "console=ttyS0 loglevel=4 nr_cpus=1 irqpoll reset_devices panic=-1 no_timer_check rdinit=/init "
    # The crash kernel has little memory and needs no memcgs.
    "cgroup_disable=memory"
)
_TIMEOUT = 600.0


def files(kernel: Kernel) -> dict[str, bytes]:
    """Return the files that a guest needs to load a crash kernel, by path."""
    archive = initramfs.base(kernel, init="crash-init", drivers=_DRIVERS)
    for path, data in kdump.program_and_libraries().items():
        archive.file(path, data, 0o755)
    return {
        "lab/bin/kexec-crash": compiled(kernel.arch, GUEST / "kexec-crash.c"),
        "lab/crash/bzImage": kernel.bzimage.read_bytes(),
        "lab/crash/initrd": archive.finish(),
    }


def enough_memory(topology: Topology) -> str:
    """Return a memory size (like "1024M") that leaves each node room for the crash kernel."""
    return f"{max(1024, 384 * len(topology.nodes))}M"


def _save_command(format: str, level: int) -> str:
    if format == "kdump":
        return f"makedumpfile -F -c -d {level} /proc/vmcore"
    return f"makedumpfile -F -E -d {level} /proc/vmcore" if level else "cat /proc/vmcore"


def load(machine: Machine, format: str, level: int) -> None:
    """Load the crash kernel into the memory reserved for it (kexec_file_load(2))."""
    # The crash kernel's init finds the command in its kernel command line, as one word.
    save = _save_command(format, level).replace(" ", "@")
    line = f"{_COMMAND_LINE} lab.save={save}"
    machine.guest.must(
        f"exec kexec-crash /lab/crash/bzImage /lab/crash/initrd {shlex.quote(line)}",
        what="load the crash kernel",
    )


def crash(machine: Machine, out: Path, *, flattened: bool) -> None:
    """Crash the guest, and write the memory that its crash kernel sends to `out`."""
    guest = machine.guest
    what = "crash the guest and save its memory"
    with machine.timed("crash", what), open(out, "wb") as file:
        sink = kdump.Flattened(file) if flattened else kdump.Plain(file)
        guest.crash()
        status = guest.receive(sink.feed, timeout=_TIMEOUT, what="save the crashed memory")
        # When makedumpfile failed, its status says more than an incomplete stream.
        if status == 0:
            sink.finish()
    if status != 0:
        raise guest.fail(f"saving the crashed memory failed with status {status}")
