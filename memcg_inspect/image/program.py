# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Opening an image
----------------

Makes a :class:`drgn.Program` of a vmcore, of a QEMU guest or of the running kernel, with
types to read it by, or says in one line why that cannot be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drgn import (
    Architecture,
    MainModule,
    MissingDebugInfoError,
    Platform,
    Program,
    ProgramFlags,
)

from memcg_inspect.btf import load_btf
from memcg_inspect.image.elf import cut_short, hide_holes
from memcg_inspect.model import ImageError

__all__ = ("DebugInfo", "ImageSource", "open_program")

DebugInfo = Literal["auto", "dwarf", "btf"]


@dataclass(frozen=True)
class ImageSource:
    """
    What to look at, and where its types are.

    :ivar core: path of a vmcore
    :ivar qemu: address of a QMP socket; without both, the running kernel
    :ivar qemu_descriptor: an open connection to it, which drgn then closes
    :ivar symbols: files with debug info, ``vmlinux`` and modules
    :ivar default_symbols: whether to look for debug info on this system, too
    :ivar debug_directories: folders to look in, before drgn's own
    :ivar architecture: name of a :class:`drgn.Architecture`, for dumps that do not tell
    :ivar vmcoreinfo: path of a VMCOREINFO note, in place of the image's
    :ivar debuginfo: ``dwarf`` or ``btf`` for nothing else; ``auto`` for the debug info that is
        given, else what is found, else BTF
    """

    core: str | None = None
    qemu: str | None = None
    qemu_descriptor: int | None = None
    symbols: Sequence[str] = field(default=())
    default_symbols: bool = True
    debug_directories: Sequence[str] = field(default=())
    architecture: str | None = None
    vmcoreinfo: str | None = None
    debuginfo: DebugInfo = "auto"

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return self.core or self.qemu or "the running kernel"


def open_program(source: ImageSource) -> Program:
    """
    Open an image and load its types.

    :raises ImageError: if that cannot be done
    """
    for path in (*source.symbols, *filter(None, [source.vmcoreinfo])):
        _check_readable(path)
    platform = None
    if source.architecture is not None:
        platform = Platform(Architecture[source.architecture.upper()])
    vmcoreinfo = Path(source.vmcoreinfo).read_bytes() if source.vmcoreinfo else None
    prog = Program(platform=platform, vmcoreinfo=vmcoreinfo)
    try:
        _open(prog, source)
    except ImageError as error:
        why = None if source.core is None else cut_short(source.core)
        if why is None:
            raise
        raise ImageError(f"{error} ({why})") from None
    return prog


def _open(prog: Program, source: ImageSource) -> None:
    _attach(prog, source)
    if not prog.flags & ProgramFlags.IS_LINUX_KERNEL:
        raise ImageError(
            f"{source.name} is no image of a Linux kernel (a dump needs a VMCOREINFO note; "
            "--vmcoreinfo gives one)"
        )
    _load_types(prog, source)


def _check_readable(path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}") from None


def _attach(prog: Program, source: ImageSource) -> None:
    if source.core is not None:
        _check_readable(source.core)
    try:
        if source.core is not None:
            prog.set_core_dump(source.core)
            hide_holes(prog, source.core)
        elif source.qemu is not None:
            descriptor = source.qemu_descriptor
            prog.set_qemu_qmp(source.qemu if descriptor is None else descriptor)
        else:
            prog.set_kernel()
    except PermissionError as error:
        raise ImageError(
            f"no permission to read {error.filename or source.name}: run as root (sudo), or "
            "give a vmcore with -c"
        ) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ImageError(
            f"{source.name} cannot be opened: {where}{error.strerror or error}"
        ) from None
    except Exception as error:  # drgn raises plain exceptions for what is no dump
        raise ImageError(f"{source.name} cannot be opened: {_one_line(error)}") from None


def _load_types(prog: Program, source: ImageSource) -> None:
    if source.debuginfo == "btf":
        if source.symbols:
            raise ImageError(f"{source.symbols[0]}: a file with debug info, and only BTF is wanted")
        load_btf(prog)
        return
    main = _load_dwarf(prog, source)
    if main is not None and not main.wants_debug_file():
        return
    if source.debuginfo == "auto" and not source.symbols:
        load_btf(prog)
        return
    _explain_missing(main, source)


# Returns the kernel itself, if it is known which it is: it may still want debug info.
def _load_dwarf(prog: Program, source: ImageSource) -> MainModule | None:
    if source.debug_directories:
        options = prog.debug_info_options
        options.directories = (*source.debug_directories, *options.directories)
    try:
        with suppress(MissingDebugInfoError):
            prog.load_debug_info(source.symbols, main=source.default_symbols)
    except Exception as error:
        raise ImageError(f"debug info cannot be loaded: {_one_line(error)}") from None
    try:
        return prog.main_module()
    except LookupError:
        return None


def _explain_missing(main: MainModule | None, source: ImageSource) -> None:
    image = main.build_id.hex() if main is not None and main.build_id else "unknown"
    for path in source.symbols:
        given = _build_id(path)
        if given == image:
            raise ImageError(f"{path} has no debug info: it is stripped")
        if given is not None:
            raise ImageError(
                f"{path} is of another kernel: its build ID is {given}, that of the image "
                f"is {image}"
            )
        raise ImageError(f"{path} is not an ELF file with debug info")
    raise ImageError(
        f"no debug info for {source.name} (build ID {image}): give its vmlinux with -s, or "
        "install the kernel's debug package (Debian: linux-image-RELEASE-dbg)"
    )


def _build_id(path: str) -> str | None:
    module = Program().extra_module(path, create=True)
    try:
        module.try_file(path)
    except Exception:  # whatever is wrong with it, it has no build ID
        return None
    return module.build_id.hex() if module.build_id else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
