# SPDX-License-Identifier: LGPL-2.1-or-later
"""Crash a guest, and save its memory with kexec, a crash kernel and makedumpfile."""

import shlex
from pathlib import Path

from . import foreign, initramfs, kdump
from .arch import Arch
from .kernels import Kernel
from .machine import Machine
from .programs import GUEST, compiled
from .topology import Topology

_DRIVERS = ["virtio_pci", "virtio_console"]
_COMMAND_LINE = (
    "loglevel=4 nr_cpus=1 irqpoll reset_devices panic=-1 rdinit=/init "
    # The crash kernel has little memory and needs no memcgs.
    "cgroup_disable=memory"
)
_TIMEOUT = 600.0


def files(kernel: Kernel) -> dict[str, bytes]:
    """Return the files that a guest needs to load a crash kernel, by path."""
    archive = initramfs.base(kernel, init="crash-init", drivers=_DRIVERS)
    for path, data in kdump.program_and_libraries(kernel.arch).items():
        archive.file(path, data, 0o755)
    if _loads_files(kernel):
        loader = {"lab/bin/kexec-crash": compiled(kernel.arch, GUEST / "kexec-crash.c")}
    else:
        loader = foreign.programs(kernel.arch, ["kexec-tools"], ["kexec"])
    return {
        **loader,
        "lab/crash/bzImage": kernel.bzimage.read_bytes(),
        "lab/crash/initrd": archive.finish(),
    }


def append(kernel: Kernel) -> str:
    """Return the kernel parameter that reserves memory for the crash kernel."""
    return f"crashkernel={kernel.arch.crash_memory}M"


def _loads_files(kernel: Kernel) -> bool:
    """Return whether the kernel itself loads a crash kernel: kexec_file_load(2)."""
    return kernel.config.get("CONFIG_KEXEC_FILE") == "y"


def enough_memory(arch: Arch, topology: Topology) -> str:
    """Return a memory size (like "1024M") that leaves each node room for the crash kernel."""
    return f"{max(1024, 2 * arch.crash_memory * len(topology.nodes))}M"


def _save_command(format: str, level: int) -> str:
    if format == "kdump":
        return f"makedumpfile -F -c -d {level} /proc/vmcore"
    return f"makedumpfile -F -E -d {level} /proc/vmcore" if level else "cat /proc/vmcore"


def load(machine: Machine, format: str, level: int) -> None:
    """Load the crash kernel into the memory reserved for it."""
    # The crash kernel's init finds the command in its kernel command line, as one word.
    save = _save_command(format, level).replace(" ", "@")
    kernel = machine.kernel
    line = shlex.quote(f"{kernel.arch.parameters} {_COMMAND_LINE} lab.save={save}")
    script = f"exec kexec-crash /lab/crash/bzImage /lab/crash/initrd {line}"
    if not _loads_files(kernel):
        script = (
            f"exec kexec -p /lab/crash/bzImage --initrd=/lab/crash/initrd --command-line={line}"
        )
    machine.guest.must(script, what="load the crash kernel")


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
