# SPDX-License-Identifier: LGPL-2.1-or-later
"""Kernels that somebody else built: a build tree, a folder like those of the cache, a source."""

import os
import shutil
from pathlib import Path

from . import build, kernels
from .errors import LabError
from .kernels import Kernel
from .paths import cache_folder
from .run import BUILD_TOOLS, need
from .store import file_hash, fresh_folder, locked, text_hash

#: What the lab needs of a kernel: built in, or as a module where the init can load it.
_NEEDED = tuple(
    f"CONFIG_{option}"
    for option in [
        "64BIT",
        "SMP",
        "NUMA",
        "ACPI_NUMA",
        "CGROUPS",
        "MEMCG",
        "PROC_FS",
        "PROC_KCORE",
        "SYSFS",
        "TMPFS",
        "BLK_DEV_INITRD",
        "BINFMT_ELF",
        "BINFMT_SCRIPT",
        "SERIAL_8250_CONSOLE",
        "KALLSYMS_ALL",
        "SWAP",
        "VIRTIO_PCI",
        "VIRTIO_CONSOLE",
        "VIRTIO_BLK",
    ]
)
#: The audit takes types from either.
_TYPES = ("CONFIG_DEBUG_INFO_BTF", "CONFIG_DEBUG_INFO")
_FRAGMENTS = ("lab",)
#: Each has a few hundred megabytes.
_MOST_COPIES = 4
_IMAGE = Path("arch/x86/boot/bzImage")


def from_folder(folder: Path) -> Kernel:
    """
    Make a kernel ready that is in a folder.

    :param folder: a build tree, or a folder as ``scripts/lab kernel NAME`` prints it. Only with a
        build tree can test modules be built
    :raises LabError: if it is neither, or lacks what the lab needs
    """
    folder = folder.absolute()
    if folder.parent == cache_folder("kernels").absolute() and folder.name in kernels.RECIPES:
        return kernels.kernel(folder.name)
    if (folder / _IMAGE).exists():
        if not (folder / "vmlinux").exists():
            raise LabError(f"{folder} has no vmlinux: run `make vmlinux bzImage modules` in it")
        return _taken(folder, folder)
    if (folder / "bzImage").exists() and (folder / "config").exists():
        return _taken(folder, None)
    raise LabError(
        f"{folder} has no kernel: neither {_IMAGE}, as a build tree has after `make`, nor bzImage "
        "and config"
    )


def from_source(source: Path) -> Kernel:
    """
    Build a kernel of a source with the configuration of the lab, and make it ready.

    The build tree is kept in the cache, so that another call builds only what has changed.

    :raises LabError: if it cannot be built
    """
    source = source.absolute()
    if not (source / "Kconfig").exists():
        raise LabError(f"{source} is no source of a kernel: it has no Kconfig")
    need(*BUILD_TOOLS)
    place = f"source-{text_hash(str(source))[:12]}"
    output = cache_folder("build") / place
    text = build.fragment_text(_FRAGMENTS, "gate")
    with locked(f"build-{place}"):
        make = build.make_command(source, output)
        # Options come and go: what this source does not know is told, and no error.
        known = frozenset(line.split("=")[0] for line in text.splitlines() if "=" in line)
        for line in build.configure(make, output, text, optional=known):
            print(f"lab: {source.name} has no {line}", flush=True)
        build.compile_kernel(make, place)
    return _taken(output, output)


def _taken(folder: Path, tree: Path | None) -> Kernel:
    """Copy what the lab needs of a kernel into the cache."""
    files = (_IMAGE, ".config") if tree else ("bzImage", "config")
    inputs = text_hash([file_hash(folder / name) for name in files])
    target = cache_folder("given") / f"given-{inputs[:12]}"
    with locked(f"kernel-{target.name}"):
        if not target.exists():
            with fresh_folder(target) as made:
                if tree:
                    build.collect(folder, made)
                else:
                    shutil.copytree(folder, made, dirs_exist_ok=True, copy_function=_linked)
    os.utime(target)
    _trim(target.parent)
    try:
        release = (target / "release").read_text().strip()
    except FileNotFoundError:
        raise LabError(f"{folder} has no file `release` with what `uname -r` prints") from None
    ready = Kernel(
        target.name, target, {"release": release, "packages": {}, "inputs": inputs}, tree
    )
    _check(ready)
    kernels.give(ready)
    return ready


def _trim(folder: Path) -> None:
    """Remove the copies that were used longest ago."""
    copies = sorted(folder.glob("given-*"), key=lambda path: path.stat().st_mtime)
    for old in copies[:-_MOST_COPIES]:
        shutil.rmtree(old, ignore_errors=True)


def _linked(source: str, target: str) -> None:
    # A vmlinux has hundreds of megabytes.
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _check(kernel: Kernel) -> None:
    missing = [option for option in _NEEDED if kernel.config.get(option) not in ("y", "m")]
    if not any(kernel.config.get(option) == "y" for option in _TYPES):
        missing.append(" or ".join(_TYPES))
    if missing:
        raise LabError(f"kernel {kernel.release} has no {', '.join(missing)}")
