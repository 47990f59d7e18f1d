# SPDX-License-Identifier: LGPL-2.1-or-later
"""Make the initramfs of a guest, which is its only filesystem."""

from pathlib import Path

from .cpio import Cpio
from .kernels import Kernel
from .kmodules import in_order
from .programs import GUEST, busybox, compiled

# Drivers for the lab's ports, disks and shares, loaded unless they are built in.
_DRIVERS = ["virtio_pci", "virtio_console", "virtio_blk", "qemu_fw_cfg"]
_SHARES = ["virtiofs", "9p", "9pnet_virtio"]


def base(kernel: Kernel, *, init: str, drivers: list[str]) -> Cpio:
    """Return an archive with busybox, an init, and the drivers that the init loads first."""
    archive = Cpio()
    for name in ("proc", "sys", "dev", "tmp", "run", "root"):
        archive.folder(name)
    archive.character_device("dev/console", 5, 1)
    archive.file("bin/busybox", busybox(kernel.arch), 0o755)
    archive.file("init", (GUEST / init).read_bytes(), 0o755)
    order = []
    for number, (name, data) in enumerate(in_order(kernel, drivers).items()):
        order.append(f"{number:02}-{name}.ko")
        archive.file(f"lab/drivers/{order[-1]}", data)
    archive.folder("lab/drivers")
    return archive


def guest(
    kernel: Kernel,
    *,
    programs: dict[str, bytes],
    modules: list[Path],
    extra: dict[str, bytes],
    shares: bool,
) -> bytes:
    """Return the initramfs of a guest: programs and modules by name, `extra` files by path."""
    drivers = _DRIVERS + (_SHARES if shares else [])
    archive = base(kernel, init="init", drivers=drivers)
    archive.file("lab/agent", (GUEST / "agent").read_bytes())
    archive.file("lab/bin/record", compiled(kernel.arch, GUEST / "record.c"), 0o755)
    for name, data in programs.items():
        archive.file(f"lab/workloads/{name}", data, 0o755)
    for module in modules:
        archive.file(f"lab/modules/{module.name}", module.read_bytes())
    for name, data in extra.items():
        archive.file(name, data, 0o755)
    return archive.finish()
