# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Opening images
--------------

Opens a vmcore, a QEMU guest or the running kernel as a :class:`drgn.Program`, and loads its types.
If that fails, the error is one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
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
from memcg_inspect.image.dump_file import DumpFile, Report, nothing_to_report, open_dump
from memcg_inspect.image.elf import check_elf, cut_short, protect, translates_addresses
from memcg_inspect.image.file_format import check_format
from memcg_inspect.image.kdump import check_kdump
from memcg_inspect.image.missing import as_image_errors
from memcg_inspect.image.qmp import GREETING_TIMEOUT, Monitor
from memcg_inspect.model import ImageError

__all__ = ("DebugInfo", "ImageSource", "open_program")

DebugInfo = Literal["auto", "dwarf", "btf"]

_CACHE = ("memcg_inspect", "dump_file")
#: ``VMCOREINFO_BYTES`` is one page, of 64 KiB at most.
_LONGEST_VMCOREINFO = 64 << 10


@dataclass(frozen=True)
class ImageSource:
    """
    Image to open, and where its types are.

    :ivar core: path of a vmcore
    :ivar parts: paths of the other parts, if *core* is one part of a split dump. Those that lie
        beside it are found without.
    :ivar qemu: address of a QMP socket. Without *core* and *qemu*, the running kernel is opened.
    :ivar qemu_descriptor: file descriptor of a connection to it, which drgn closes
    :ivar timeout: seconds to wait for QEMU, if there is no such connection yet
    :ivar symbols: paths of files with debug info: ``vmlinux`` and modules
    :ivar default_symbols: whether to search this system for debug info
    :ivar debug_directories: directories to search before drgn's own
    :ivar architecture: name of a :class:`drgn.Architecture`, for dumps that do not have it
    :ivar vmcoreinfo: path of a VMCOREINFO note to use in place of the image's
    :ivar debuginfo: ``dwarf`` to use debug info only, ``btf`` to use BTF only, ``auto`` to use the
        debug info that is given or found, and else BTF
    :ivar report: function to call with what is copied, and the share of it that is done, if the
        dump must be copied first
    """

    core: str | None = None
    parts: Sequence[str] = field(default=())
    qemu: str | None = None
    qemu_descriptor: int | None = None
    timeout: float = GREETING_TIMEOUT
    symbols: Sequence[str] = field(default=())
    default_symbols: bool = True
    debug_directories: Sequence[str] = field(default=())
    architecture: str | None = None
    vmcoreinfo: str | None = None
    debuginfo: DebugInfo = "auto"
    report: Report = nothing_to_report

    @property
    def name(self) -> str:
        """Return the name of the image for messages."""
        return self.core or self.qemu or "the running kernel"


def open_program(source: ImageSource) -> Program:
    """
    Open an image and load its types.

    :raises ImageError: if it cannot be opened, or has no types
    """
    for given in (*source.symbols, *filter(None, [source.vmcoreinfo])):
        _check_readable(given)
    platform = None
    if source.architecture is not None:
        platform = Platform(Architecture[source.architecture.upper()])
    prog = _program(platform, source.vmcoreinfo)
    dump = None if source.core is None else _dump_file(source)
    # As long as the program is there, its copy is open, and not removed.
    prog.cache[_CACHE] = dump
    path = None if dump is None else dump.path
    try:
        with as_image_errors():
            _open(prog, source, path)
    except ImageError as error:
        why = None if path is None else cut_short(path)
        if why is None:
            raise
        raise ImageError(f"{error} ({why})") from None
    return prog


def _program(platform: Platform | None, vmcoreinfo: str | None) -> Program:
    """:param vmcoreinfo: path of a VMCOREINFO note"""
    if vmcoreinfo is None:
        return Program(platform=platform)
    try:
        with open(vmcoreinfo, "rb") as file:
            return Program(platform=platform, vmcoreinfo=file.read(_LONGEST_VMCOREINFO))
    except Exception as error:  # drgn raises Exception for a note that lacks what it needs
        raise ImageError(f"{vmcoreinfo}: {_one_line(error)}") from None


def _dump_file(source: ImageSource) -> DumpFile:
    paths = [*filter(None, [source.core]), *source.parts]
    for path in paths:
        _check_readable(path)
        check_format(path)
    return open_dump(paths, source.report)


def _open(prog: Program, source: ImageSource, path: str | None) -> None:
    _attach(prog, source, path)
    if not prog.flags & ProgramFlags.IS_LINUX_KERNEL:
        raise ImageError(
            f"{source.name} is not an image of a Linux kernel (a dump needs a VMCOREINFO note; "
            "--vmcoreinfo gives one)"
        )
    if not translates_addresses(prog, bool(source.symbols)):
        name = "of this dump" if prog.platform is None else prog.platform.arch.name
        raise ImageError(
            f"{source.name} cannot be read: drgn does not translate virtual addresses on the "
            f"architecture {name}"
        )
    _load_types(prog, source)


def _check_readable(path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}") from None


def _attach(prog: Program, source: ImageSource, path: str | None) -> None:
    descriptor = source.qemu_descriptor
    if source.qemu is not None and descriptor is None:
        with closing(Monitor(source.qemu, source.timeout)) as monitor:
            descriptor = monitor.descriptor()
    try:
        if path is not None:
            check_elf(path)
            check_kdump(path)
            prog.set_core_dump(path)
            protect(prog, path)
        elif descriptor is not None:
            prog.set_qemu_qmp(descriptor)
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
    except Exception as error:  # drgn raises Exception for a file that is not a dump
        raise ImageError(f"{source.name} cannot be opened: {_one_line(error)}") from None


def _load_types(prog: Program, source: ImageSource) -> None:
    if source.debuginfo == "btf":
        if source.symbols:
            raise ImageError(f"-s {source.symbols[0]} and --debuginfo btf exclude each other")
        load_btf(prog)
        return
    main = _load_dwarf(prog, source)
    if main is not None and not main.wants_debug_file():
        return
    if source.debuginfo == "auto" and not source.symbols:
        load_btf(prog)
        return
    _explain_missing(main, source)


# Returns the module of the kernel, if drgn identified it. It may have no debug info.
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
            raise ImageError(f"{path} is stripped: it has no debug info")
        if given is not None:
            raise ImageError(
                f"{path} is of another kernel: its build ID is {given}, but the image's is {image}"
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
    except Exception:  # drgn could not read the file: it has no build ID
        return None
    return module.build_id.hex() if module.build_id else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
