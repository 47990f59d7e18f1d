# SPDX-License-Identifier: LGPL-2.1-or-later
"""External kernels: a build tree, a folder like those of the cache, a source."""

import shutil
import sys
from pathlib import Path

from . import build, kernels
from .errors import LabError
from .kernels import Kernel
from .paths import cache_folder
from .run import BUILD_TOOLS, need
from .store import fresh_folder, locked, text_hash, tree_hash

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
        "DEVTMPFS",
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
_FRAGMENTS = ("lab",)
#: Each has a few hundred megabytes.
_MOST_COPIES = 4
_IMAGE = Path("arch/x86/boot/bzImage")
_FOLDER = ("bzImage", "config", "release", "vmlinux", "modules")


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
        return _taken(folder, _checked(folder))
    if (folder / "bzImage").exists() and (folder / "config").exists():
        return _taken(folder, None)
    raise LabError(
        f"{folder} has no kernel: neither {_IMAGE}, as a build tree has after `make`, nor bzImage "
        "and config"
    )


def _checked(tree: Path) -> Path:
    """Return a build tree whose parts were built together."""
    if not (tree / "vmlinux").exists():
        raise LabError(f"{tree} has no vmlinux: run `make vmlinux bzImage modules` in it")
    if (tree / "vmlinux").stat().st_mtime > (tree / _IMAGE).stat().st_mtime:
        raise LabError(
            f"{tree}: vmlinux is newer than {_IMAGE}: run `make vmlinux bzImage modules` in it"
        )
    return tree


def from_source(source: Path) -> Kernel:
    """
    Build a kernel of a source with the configuration of the lab, and make it ready.

    The build tree is kept in the cache, so that another call builds only what has changed.

    :raises LabError: if it cannot be built
    """
    source = source.absolute()
    if not (source / "Kconfig").exists():
        raise LabError(f"{source} is no source of a kernel: it has no Kconfig")
    if (source / ".config").exists():
        raise LabError(
            f"{source} was built in place, so Kbuild refuses to build it elsewhere: run `make "
            "mrproper` in it, or give it as --kernel-dir"
        )
    need(*BUILD_TOOLS)
    place = f"source-{text_hash(str(source))[:12]}"
    output = cache_folder("build") / place
    text = build.fragment_text(_FRAGMENTS, "gate")
    with locked(f"build-{place}"):
        make = build.make_command(source, output)
        # Options come and go: those that the source lacks are reported, not an error.
        known = frozenset(line.split("=")[0] for line in text.splitlines() if "=" in line)
        for line in build.configure(make, output, text, optional=known):
            print(f"lab: {source.name} has no {line}", file=sys.stderr)
        build.compile_kernel(make, place, place, build.TARGETS["amd64"])
        return _taken(output, output)


def _taken(folder: Path, tree: Path | None) -> Kernel:
    """Copy what the lab needs of a kernel into the cache, in place of an older copy."""
    target = cache_folder("given") / f"given-{text_hash(str(folder))[:12]}"
    with locked(f"kernel-{target.name}"), fresh_folder(target) as made:
        if tree:
            build.collect(folder, made, build.TARGETS["amd64"])
        else:
            _copy(folder, made)
        inputs = tree_hash(made)
    _trim(target.parent)
    try:
        release = (target / "release").read_text().strip()
    except FileNotFoundError:
        raise LabError(f"{folder} has no file `release` with what `uname -r` prints") from None
    facts = {"release": release, "packages": {}, "inputs": inputs}
    ready = Kernel(target.name, target, facts, tree)
    _check(ready)
    kernels.give(ready)
    return ready


def _copy(folder: Path, made: Path) -> None:
    for name in _FOLDER:
        if (folder / name).is_dir():
            shutil.copytree(folder / name, made / name)
        elif (folder / name).exists():
            shutil.copy2(folder / name, made / name)


def _trim(folder: Path) -> None:
    """Remove the oldest copies."""
    copies = sorted(folder.glob("given-*"), key=lambda path: path.stat().st_mtime)
    for old in copies[:-_MOST_COPIES]:
        shutil.rmtree(old, ignore_errors=True)


def _check(kernel: Kernel) -> None:
    missing = [option for option in _NEEDED if kernel.config.get(option) not in ("y", "m")]
    if missing:
        raise LabError(f"kernel {kernel.release} has no {', '.join(missing)}")
    has_btf = kernel.config.get("CONFIG_DEBUG_INFO_BTF") == "y"
    if not has_btf and not (kernel.config.get("CONFIG_DEBUG_INFO") and kernel.vmlinux.exists()):
        raise LabError(
            f"kernel {kernel.release} has no types: neither CONFIG_DEBUG_INFO_BTF nor a vmlinux "
            "with debug info"
        )
