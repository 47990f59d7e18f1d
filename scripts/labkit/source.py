# SPDX-License-Identifier: LGPL-2.1-or-later
"""The source of the kernel: Debian's package unpacked, and patched copies of it.

make compares modification times, so a file gets a new one whenever its content changes.
"""

import os
import re
import shutil
from pathlib import Path

from .apt import Archive
from .errors import LabError
from .paths import cache_folder
from .run import need, run
from .store import fresh_folder, locked, text_hash, tree_hash, write_atomically

_STAMP = ".lab-source"


def source(series: str, *, refresh: bool = False) -> tuple[Path, str]:
    """Return the folder of the unpacked linux-source of a series, and the package's version."""
    target = folder(series)
    package = target.name
    marker = target / _STAMP
    with locked(package):
        if marker.exists() and not refresh:
            return target, marker.read_text().strip()
        archive = Archive()
        if package not in archive.names(package):
            raise LabError(f"Debian's archive has no {package} now")
        version = archive.version(package)
        if marker.exists() and marker.read_text().strip() == version:
            return target, version
        with fresh_folder(target) as made:
            _unpack(archive, package, made)
            write_atomically(made / _STAMP, version.encode() + b"\n")
        return target, version


def _unpack(archive: Archive, package: str, folder: Path) -> None:
    deb = archive.download(package, folder)
    run(["dpkg-deb", "-x", deb, folder / "deb"], what=f"unpack {package}")
    deb.unlink()
    (tarball,) = (folder / "deb" / "usr" / "src").glob(f"{package}.tar.*")
    need("xz")
    # -m: files of a newer version must be newer than what was built from the older one.
    untar = ["tar", "-xm", "--strip-components=1", "-C", folder, "-f", tarball]
    run(untar, what=f"unpack {tarball.name}")
    shutil.rmtree(folder / "deb")


def folder(series: str) -> Path:
    """Return the folder for the source of a series."""
    return cache_folder("src") / f"linux-source-{series}"


def patched_folder(name: str) -> Path:
    """Return the folder for the patched source of a kernel."""
    return cache_folder("src") / name


def patched(name: str, tree: Path, version: str, patches: list[Path]) -> Path:
    """Make a patched copy of a source, and return its folder.

    Files that no patch names are hard links to the source. The others are copied before they are
    patched, so that nothing is written through a link.
    """
    need("patch")
    target = patched_folder(name)
    marker = target / _STAMP
    wanted = text_hash([version, [tree_hash(patch) for patch in patches]])
    found = marker.read_text().split("\n") if marker.exists() else [""]
    if found[0] == wanted:
        return target
    touched = set()
    for patch in patches:
        touched |= set(re.findall(r"(?m)^(?:---|\+\+\+) [ab]/(\S+)", patch.read_text()))
    with fresh_folder(target) as made:
        run(["cp", "-al", f"{tree}/.", made], what=f"copy the source for {name}")
        (made / _STAMP).unlink(missing_ok=True)
        for path in touched:
            _own_copy(made / path)
        for patch in patches:
            run(["patch", "-p1", "-s", "-d", made, "-i", patch], what=f"apply {patch.name}")
        for path in touched | set(filter(None, found[1:])):
            _set_time(target / path, made / path)
        write_atomically(made / _STAMP, "\n".join([wanted, *sorted(touched)]).encode())
    return target


def _own_copy(path: Path) -> None:
    if path.exists():
        copy = path.with_name(path.name + ".lab-copy")
        shutil.copy2(path, copy)
        copy.replace(path)


def _set_time(old: Path, new: Path) -> None:
    # make must rebuild what changed since the last time, and nothing else.
    if not new.exists():
        return
    _own_copy(new)
    if old.exists() and old.read_bytes() == new.read_bytes():
        stat = old.stat()
        os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    else:
        os.utime(new)
