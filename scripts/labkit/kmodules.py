# SPDX-License-Identifier: LGPL-2.1-or-later
"""Kernel modules: the drivers that a guest needs, and the project's test modules."""

import lzma
import re
import shutil
import subprocess
from pathlib import Path

from .errors import LabError
from .kernels import Kernel
from .paths import cache_folder
from .run import BUILD_TOOLS, need, run, tool
from .store import fresh_folder, locked, read_stamp, text_hash, tree_hash, write_stamp


def plain_name(file: str) -> str:
    """Return a module's name as the kernel spells it, from a file name."""
    return re.sub(r"\.ko(\.\w+)?$", "", file.rsplit("/", 1)[-1]).replace("-", "_")


def read_module(path: Path) -> bytes:
    """Return a module's ELF file, decompressed."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":
        return subprocess.run([tool("zstd"), "-dcq", path], capture_output=True, check=True).stdout
    return data


def depends(module: bytes) -> list[str]:
    """Return the modules that a module depends on (depends= in its .modinfo)."""
    match = re.search(rb"(?:^|\0)depends=([^\0]*)\0", module)
    words = match[1].decode().split(",") if match else []
    return [word.replace("-", "_") for word in words if word]


def in_order(kernel: Kernel, wanted: list[str]) -> dict[str, bytes]:
    """Return the wanted modules and their dependencies, in the order to load them.

    Modules that are built in, or that this kernel does not have, are left out.
    """
    folder = kernel.folder / "modules"
    files = {plain_name(str(path)): path for path in folder.rglob("*.ko*")}
    order: dict[str, bytes] = {}

    def visit(name: str) -> None:
        if name in order or name not in files:
            return
        data = read_module(files[name])
        for other in depends(data):
            visit(other)
        order[name] = data

    for name in wanted:
        visit(name)
    return order


def has_driver(kernel: Kernel, module: str, option: str) -> bool:
    """Return whether a kernel has a driver, as a module or built in."""
    return kernel.config.get(option) == "y" or bool(in_order(kernel, [module]))


def own_name(folder: Path) -> str | None:
    """Return the name of a module of the kernel itself, given as ``+NAME``; None for a folder."""
    text = str(folder)
    return text[1:].replace("-", "_") if text.startswith("+") else None


def with_dependencies(kernel: Kernel, name: str) -> tuple[tuple[str, str], ...]:
    """Return a module of the kernel itself, after those that it depends on, as --module takes it.

    :raises LabError: if the kernel has no such module
    """
    order = in_order(kernel, [name])
    if name not in order:
        raise LabError(f"kernel {kernel.name} has no module {name}")
    return tuple((f"+{module}", "") for module in order)


def check_folder(folder: Path) -> None:
    """Raise LabError unless a folder holds the source of a kernel module, or is ``+NAME``."""
    if (
        own_name(folder) is None
        and not (folder / "Kbuild").exists()
        and not (folder / "Makefile").exists()
    ):
        raise LabError(f"--module: {folder} has no Kbuild")


def build_module(kernel: Kernel, folder: Path) -> Path:
    """Build an out-of-tree module (a folder with a Kbuild), and return the .ko file.

    For ``+NAME``, return the kernel's own module of this name, decompressed.
    """
    name = own_name(folder)
    if name is not None:
        return _own_module(kernel, name)
    command = kernel.module_command
    if command is None:
        raise LabError(
            f"--module: kernel {kernel.name} was not built here; Debian's headers need another "
            "compiler, so test modules need a kernel like 7.3-lab"
        )
    check_folder(folder)
    need(*BUILD_TOOLS)
    key = text_hash([kernel.facts["inputs"], tree_hash(folder), folder.name])[:16]
    name = f"{folder.name}-{kernel.file_name}-{key}"
    built = cache_folder("modules") / name
    with locked(f"module-{name}"):
        if read_stamp(built) is None:
            with fresh_folder(built) as made:
                _make_module(command, folder, made, kernel.name)
                write_stamp(made, {"kernel": kernel.name})
    (result,) = built.glob("*.ko")
    return result


def _own_module(kernel: Kernel, name: str) -> Path:
    order = in_order(kernel, [name])
    if name not in order:
        raise LabError(f"--module: kernel {kernel.name} has no module {name}")
    key = text_hash([kernel.facts, name])[:16]
    kept = cache_folder("modules") / f"{name}-{kernel.file_name}-{key}"
    with locked(f"module-{kept.name}"):
        if read_stamp(kept) is None:
            with fresh_folder(kept) as made:
                (made / f"{name}.ko").write_bytes(order[name])
                write_stamp(made, {"kernel": kernel.name})
    return kept / f"{name}.ko"


def _make_module(command: list[str], folder: Path, made: Path, kernel: str) -> None:
    # Build a copy, so that the project's folders stay clean.
    work = made / "work"
    shutil.copytree(folder, work)
    what = f"build module {folder.name} for {kernel}"
    run([*command, f"M={work}", "modules"], what=what)
    results = list(work.glob("*.ko"))
    if len(results) != 1:
        raise LabError(f"--module: {folder} makes {len(results)} modules, not one")
    results[0].rename(made / results[0].name)
    shutil.rmtree(work)
