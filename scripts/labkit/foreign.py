# SPDX-License-Identifier: LGPL-2.1-or-later
"""Debian's programs for another architecture than this machine's, with their libraries."""

import re
from collections.abc import Sequence
from pathlib import Path

from .apt import Archive
from .arch import Arch
from .errors import LabError
from .paths import cache_folder
from .run import need, run
from .store import fresh_folder, locked, read_stamp, text_hash, write_stamp


def programs(arch: Arch, packages: Sequence[str], names: Sequence[str]) -> dict[str, bytes]:
    """Return programs and the libraries that they are linked with, by path.

    :param packages: Debian's packages that have them
    :param names: names of the programs; they are in /bin
    """
    root = _unpacked(arch, packages)
    files: dict[str, bytes] = {}
    todo = [_only(root, name, r"(usr/)?s?bin/") for name in names]
    for path in todo:
        files[f"bin/{path.name}"] = path.read_bytes()
    seen: set[str] = set()
    while todo:
        path = todo.pop()
        for wanted in _needed(path):
            if wanted in seen:
                continue
            seen.add(wanted)
            library = _only(root, wanted, r"(usr/)?lib/([^/]*-linux-gnu[^/]*/)?")
            # The dynamic linker has its path in every program.
            place = "lib" if wanted.startswith("ld") else f"lib/{_triplet(arch)}"
            files[f"{place}/{wanted}"] = library.read_bytes()
            todo.append(library)
    return files


def file_of(arch: Arch, package: str, name: str) -> bytes:
    """Return one file of a package's folder for programs."""
    return _only(_unpacked(arch, [package]), name, r"(usr/)?s?bin/").read_bytes()


def _triplet(arch: Arch) -> str:
    return arch.cross.removesuffix("-")


def _needed(path: Path) -> list[str]:
    need("readelf")
    told = run(["readelf", "-d", "-l", "-W", path], what=f"read what {path.name} is linked with")
    libraries = re.findall(r"\(NEEDED\).*\[([^\]]+)\]", told)
    linker = re.findall(r"interpreter: /\S*/([^\]/]+)\]", told)
    return libraries + linker


def _only(root: Path, name: str, folder: str) -> Path:
    """Return a file of this name in a folder that matches, with symbolic links resolved."""
    for path in sorted(root.rglob(name)):
        if re.fullmatch(folder, f"{path.parent.relative_to(root)}/") and path.exists():
            return path
    raise LabError(f"Debian's packages have no {name}")


def _unpacked(arch: Arch, packages: Sequence[str]) -> Path:
    """Return a folder with the files of packages, and of the libraries that they depend on."""
    folder = cache_folder("programs") / f"root-{arch.name}-{text_hash(sorted(packages))[:16]}"
    with locked(f"program-{folder.name}"):
        if read_stamp(folder) is None:
            archive = Archive(arch.name)
            names = archive.with_libraries(packages)
            with fresh_folder(folder) as made:
                for name in names:
                    deb = archive.download(name, made)
                    run(["dpkg-deb", "-x", deb, made], what=f"unpack {deb.name}")
                    deb.unlink()
                run(["rm", "-rf", made / "usr/share"], what="clean up")
                write_stamp(made, {"packages": names})
    return folder
