# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Whether a crash would leave what an audit needs
-----------------------------------------------

Looks at the kdump of this machine as Debian (``/etc/default/kdump-tools``), Fedora
(``/etc/kdump.conf``) and SUSE (``/etc/sysconfig/kdump``) configure it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memcg_inspect.crash.dumps import CRASHES

__all__ = ("Check", "advice", "checks")

#: Bits of the level of makedumpfile. Those of free pages and pages of zeroes are never missed.
_USER_DATA = 8
#: The level that leaves out all that an audit does not need, on any kernel.
_LEVEL = 23
#: Debian's makedumpfile takes tail pages for user data on these kernels and newer ones.
_TAILS = (7, 1)
_DEFAULT_LEVEL = 31
#: The option with the level, alone or with others: ``-d 31``, ``-cd31``, ``-d 0x1f``, ``-d 17,31``.
_LEVELS = re.compile(r"((?:^|\s)-[A-Za-z]*d\s*)((?:0[xX][0-9A-Fa-f]+|\d+)(?:,\d+)*)")
_RESERVED = 192 << 20
#: Options of makedumpfile that erase what a file says.
_FILTERS = frozenset({"--config", "--eppic"})
#: Options of Fedora's kdump.conf that save a dump elsewhere.
_REMOTE = ("ssh", "nfs", "raw", "ext2", "ext3", "ext4", "xfs", "btrfs", "virtiofs")
#: Values of KDUMP_COMPRESSION that an audit unpacks.
_PACKED = frozenset({"gzip", "xz", "lz4", "bzip2"})
#: Options of makedumpfile that compress pages.
_PAGES = {"c": "zlib", "l": "lzo", "p": "snappy", "z": "zstd"}


class Check(NamedTuple):
    """
    One thing that a crash dump needs.

    :ivar name: what it is
    :ivar is_good: whether it is as it must be; ``None`` if that cannot be told
    :ivar found: what it is now
    :ivar fix: what to do, as lines of a shell or of a file; empty if nothing is to be done
    """

    name: str
    is_good: bool | None
    found: str
    fix: str = ""


def checks(root: str = "/") -> Iterator[Check]:
    """Check the kdump of a machine, from its files below a directory."""
    top = Path(root)
    setup = _setup(top)
    if setup is None:
        package = "kdump-tools" if _is_debian(top) else "kexec-tools"
        yield Check("kdump", False, "not installed", f"install the package {package}")
    else:
        yield setup
    loaded = _number(_read(top / "sys/kernel/kexec_crash_loaded"))
    yield _reserved(top, bool(loaded))
    yield _loaded(top, loaded)
    yield _level(top)
    if setup is not None:
        yield _target(top)
        yield _filters(top)
        yield _compression(top)


def advice(root: str = "/") -> str:
    """Return what to do so that the next dump has all that an audit needs, in lines."""
    fixes = [check.fix for check in checks(root) if check.is_good is False and check.fix]
    if not fixes:
        return "memcg-inspect crash config says what a crash of this machine would leave.\n"
    lines = "".join(f"    {fix}\n" for fix in fixes)
    return f"So that the next dump of this machine has all that an audit needs:\n{lines}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _variables(text: str) -> dict[str, str]:
    """Return the variables that a file of a shell sets, without what it computes."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\s*(?:export\s+)?(\w+)=(.*)", line)
        if match:
            try:
                words = shlex.split(match[2], comments=True)
            except ValueError:
                continue
            found[match[1]] = words[0] if words else ""
    return found


def _setup(top: Path) -> Check | None:
    debian = _read(top / "etc/default/kdump-tools")
    if debian is not None:
        is_on = _variables(debian).get("USE_KDUMP") == "1"
        fix = "" if is_on else "set USE_KDUMP=1 in /etc/default/kdump-tools"
        return Check("kdump", is_on, "kdump-tools", fix)
    for name in ("etc/kdump.conf", "etc/sysconfig/kdump"):
        if (top / name).exists():
            return Check("kdump", True, f"/{name}")
    return None


def _is_debian(top: Path) -> bool:
    return (top / "etc/debian_version").exists()


def _reserved(top: Path, is_loaded: bool) -> Check:
    size = _number(_read(top / "sys/kernel/kexec_crash_size"))
    if size is None:
        return Check("reserved memory", None, "unknown: /sys/kernel/kexec_crash_size is not there")
    found = f"{size >> 20:,} MiB"
    if size >= _RESERVED:
        return Check("reserved memory", True, found)
    if size and is_loaded:
        return Check("reserved memory", None, f"{found}: whether that is enough, a crash shows")
    fix = "set crashkernel=512M in the kernel's command line, and reboot"
    if _is_debian(top):
        fix = "set crashkernel=512M in /etc/default/grub.d/kdump-tools.cfg, update-grub, reboot"
    return Check("reserved memory", False, found if size else "none", fix)


def _loaded(top: Path, loaded: int | None) -> Check:
    if loaded is None:
        return Check("crash kernel", None, "unknown: /sys/kernel/kexec_crash_loaded is not there")
    if loaded:
        return Check("crash kernel", True, "loaded")
    fix = "kdump-config load" if _is_debian(top) else "systemctl restart kdump"
    return Check("crash kernel", False, "not loaded", fix)


def _number(text: str | None) -> int | None:
    words = "" if text is None else text.strip()
    return int(words) if words.isascii() and words.isdigit() else None


def _level(top: Path) -> Check:
    """Check the level of makedumpfile: user data are left out of most dumps."""
    arguments, fix = _arguments(top)
    # Of several options, the last one counts. Of several levels, makedumpfile takes the next one if
    # there is no room.
    given = [match[2] for match in _LEVELS.finditer(arguments)] or ["0"]
    levels = [int(text, 16 if "x" in text.lower() else 10) for text in given[-1].split(",")]
    level = next((level for level in levels if level & _USER_DATA), levels[0])
    release = _read(top / "proc/sys/kernel/osrelease") or ""
    kernel = re.match(r"(\d+)\.(\d+)", release)
    is_new = kernel is not None and (int(kernel[1]), int(kernel[2])) >= _TAILS
    if not level & _USER_DATA or (kernel is not None and not is_new):
        return Check("dump level", True, str(level))
    if kernel is None:
        return Check("dump level", None, f"{level}, of an unknown kernel", fix)
    why = (
        f"{level}: makedumpfile up to 1.7.8 takes pages of slabs for user data on Linux 7.1 and "
        "newer, and leaves them out"
    )
    return Check("dump level", False, why, fix)


def _target(top: Path) -> Check:
    """Check where dumps are saved: the service looks in one directory of this machine."""
    debian = _read(top / "etc/default/kdump-tools")
    fedora, suse = _read(top / "etc/kdump.conf"), _read(top / "etc/sysconfig/kdump")
    folder = remote = ""
    if debian is not None:
        variables = _variables(debian)
        folder = variables.get("KDUMP_COREDIR", "")
        remote = next((name for name in ("SSH", "NFS", "FTP") if variables.get(name)), "")
    elif fedora is not None:
        options = dict(re.findall(r"^\s*(\w+)\s+(\S.*?)\s*$", fedora, re.MULTILINE))
        folder = options.get("path", "")
        remote = next((name for name in _REMOTE if name in options), "")
    elif suse is not None:
        place = _variables(suse).get("KDUMP_SAVEDIR", "")
        is_local = "://" not in place or place.startswith("file://")
        folder, remote = (place.removeprefix("file://"), "") if is_local else ("", place)
    if remote:
        found = f"{remote}: run memcg-inspect crash report where dumps are saved"
        return Check("target", None, found)
    folder = folder.rstrip("/") or CRASHES
    if folder != CRASHES:
        return Check("target", False, folder, f"save dumps to {CRASHES}, which the service reads")
    return Check("target", True, folder)


def _filters(top: Path) -> Check:
    """Check for options of makedumpfile that overwrite memory of the kernel in the dump."""
    arguments, _ = _arguments(top)
    used = [word for word in arguments.split() if word.split("=")[0] in _FILTERS]
    if not used:
        return Check("filters", True, "none")
    fix = f"remove {' '.join(used)} from the arguments of makedumpfile"
    return Check("filters", None, f"{' '.join(used)}: what is erased cannot be audited", fix)


def _compression(top: Path) -> Check:
    """Check how dumps are compressed."""
    whole = _variables(_read(top / "etc/default/kdump-tools") or "").get("KDUMP_COMPRESSION")
    if whole:
        is_good = True if whole in _PACKED else None
        return Check("compression", is_good, f"{whole}: of the whole file")
    arguments, _ = _arguments(top)
    flags = "".join(word[1:] for word in arguments.split() if re.fullmatch(r"-[A-Za-z]\S*", word))
    found = next((name for flag, name in _PAGES.items() if flag in flags), "none")
    return Check("compression", True, found)


def _arguments(top: Path) -> tuple[str, str]:
    """Return the arguments of makedumpfile, and how to change their level."""
    debian = _read(top / "etc/default/kdump-tools")
    if debian is not None:
        arguments = _variables(debian).get("MAKEDUMP_ARGS") or f"-c -d {_DEFAULT_LEVEL}"
        line = f'MAKEDUMP_ARGS="{_with_level(arguments)}"'
        return arguments, f"set {line} in /etc/default/kdump-tools"
    fedora = _read(top / "etc/kdump.conf")
    if fedora is not None:
        lines = re.findall(r"^\s*core_collector\s+([^#\n]*?)\s*(?:#.*)?$", fedora, re.MULTILINE)
        arguments = lines[-1] if lines else f"makedumpfile -l -d {_DEFAULT_LEVEL}"
        return arguments, f"set core_collector {_with_level(arguments)} in /etc/kdump.conf"
    suse = _read(top / "etc/sysconfig/kdump")
    if suse is not None:
        level = _variables(suse).get("KDUMP_DUMPLEVEL") or str(_DEFAULT_LEVEL)
        return f"-d {level}", f"set KDUMP_DUMPLEVEL={_LEVEL} in /etc/sysconfig/kdump"
    return (
        f"-c -d {_DEFAULT_LEVEL}",
        f'set MAKEDUMP_ARGS="-c -d {_LEVEL}" in /etc/default/kdump-tools',
    )


def _with_level(arguments: str) -> str:
    return _LEVELS.sub(rf"\g<1>{_LEVEL}", arguments)
