# SPDX-License-Identifier: LGPL-2.1-or-later
"""Images that are made once and kept in the cache.

The key of an image is a hash of everything that shapes it. When a workload, the guest's init,
the kernel or the lab's code changes, the image is made anew. Comments do not count.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from . import dump
from .errors import StaleCodeError
from .fingerprint import code_hash
from .kernels import Kernel
from .kmodules import own_name
from .machine import Options, check
from .paths import cache_folder
from .programs import GUEST, WORKLOADS, source, workload_parts
from .store import file_hash, fresh_folder, locked, read_stamp, text_hash, write_stamp

T = TypeVar("T")
NAME = "vmcore"
_MOST_BYTES = 20 << 30
#: More than the tests of one file use, and few enough for a disk: two processes run tests.
_MOST_HELD = 64
#: The images that this process holds, the last one that was asked for last, with the handles that
#: have the locks.
_held: dict[Path, int] = {}
# The modules of the lab that shape an image.
_SHAPING = (
    "arch",
    "crash",
    "dump",
    "elf",
    "freeze",
    "gdb",
    "initramfs",
    "kdump",
    "machine",
    "topology",
)


@functools.cache
def _lab_hash() -> str:
    here = Path(__file__).parent
    return code_hash(*(here / f"{name}.py" for name in _SHAPING), GUEST)


def key(options: Options, image: dump.Image, kernel: Kernel) -> str:
    """Return the name of an image in the cache."""
    sources = [source(part) for part in workload_parts(options.workload)]
    sources += [WORKLOADS / "common.c", WORKLOADS / "common.h"]
    return text_hash(
        {
            # A script counts by its content (below), not by its path.
            "options": {**options.facts(), "run": None},
            "image": [image.freeze, image.format, image.level, image.seed],
            "kernel": kernel.facts,
            "workload": code_hash(*sources),
            # The kernel's own modules (+NAME) are among the facts of the kernel.
            "modules": [
                code_hash(Path(folder))
                for folder, _ in options.modules
                if own_name(Path(folder)) is None
            ],
            "run": None if options.run is None else file_hash(Path(options.run)),
            "lab": _lab_hash(),
        }
    )[:24]


def _size(folder: Path) -> int:
    try:
        return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    except FileNotFoundError:  # removed by another process
        return 0


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _locked(folder: Path, how: int) -> int | None:
    """Return a handle of a folder that has a lock on it; None if it cannot be had now."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def hold(folder: Path) -> bool:
    """Keep trim() of any process from removing a complete image; return whether there is one.

    The image is held until this process ends, or has asked for _MOST_HELD others.
    """
    handle = _locked(folder, fcntl.LOCK_SH)
    if handle is None:
        return False
    if read_stamp(folder) is None:
        os.close(handle)
        return False
    before = _held.pop(folder, None)
    _held[folder] = handle
    if before is not None:
        os.close(before)
    while len(_held) > _MOST_HELD:
        os.close(_held.pop(next(iter(_held))))
    return True


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder beside the images that is removed in the end."""
    with tempfile.TemporaryDirectory(dir=cache_folder("images"), prefix="scratch-") as name:
        handle = _locked(Path(name), fcntl.LOCK_SH)
        try:
            yield Path(name)
        finally:
            if handle is not None:
                os.close(handle)


def trim(most: int = _MOST_BYTES) -> None:
    """Remove the least recently used images until `most` bytes are left, but none that is held."""
    folders = [path for path in cache_folder("images").iterdir() if not path.name.startswith(".")]
    sizes = {folder: _size(folder) for folder in folders}
    total = sum(sizes.values())
    for folder in sorted(folders, key=_last_use):
        if total <= most:
            break
        handle = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)
            total -= sizes[folder]


def _make(options: Options, image: dump.Image, out: Path) -> None:
    """Make an image. A kdump of a guest that QEMU stops is made of the ELF image of that guest."""
    if image.format == "kdump" and image.freeze != "panic":
        elf = cached(options, replace(image, format="elf", level=0))
        dump.convert(elf, image, out)
    else:
        dump.dump(options, image, out)


def unless_stale(make: Callable[[], T]) -> T:
    """Return what a function makes of a guest. Begin again once if QEMU's CPUs ran stale code."""
    try:
        return make()
    except StaleCodeError as error:
        print(f"lab: making the image again: {error}", file=sys.stderr)
        return make()


def write(make: Callable[[Path], None], folder: Path, kernel: Kernel) -> None:
    """Make an image in a folder of the cache."""

    def once() -> None:
        with fresh_folder(folder) as made:
            make(made / NAME)
            write_stamp(made, {"kernel": kernel.name})

    unless_stale(once)


def kept(name: str, make: Callable[[Path], None], kernel: Kernel) -> Path:
    """Return the path of the image with a name in the cache; make it unless it is there."""
    folder = cache_folder("images") / name
    with locked(f"image-{name}"):
        made = False
        # Another process may remove it before it is held.
        while not hold(folder):
            write(make, folder, kernel)
            made = True
        if made:
            trim()
        # trim() removes the least recently used.
        os.utime(folder)
    return folder / NAME


@functools.cache
def _known(options: Options, image: dump.Image) -> tuple[str, Kernel]:
    dump.check(options, image)
    kernel = check(options)
    return key(options, image, kernel), kernel


def image(
    kernel: str,
    nodes: str = "1",
    workload: str = "idle",
    freeze: str = "settled",
    *,
    format: str = "elf",
    level: int = 0,
    seed: int | None = None,
    **more: Any,
) -> Path:
    """Return the path of an image as `lab dump` makes it; make it unless it is in the cache.

    The options in `more` are those of :class:`labkit.machine.Options`.
    """
    return cached(Options(kernel, nodes, workload=workload, **more),
                  dump.Image(freeze, format, level, seed))  # fmt: skip


def cached(options: Options, how: dump.Image) -> Path:
    """Return the path of an image, like image()."""
    name, kernel = _known(options, how)
    return kept(name, functools.partial(_make, options, how), kernel)
