# SPDX-License-Identifier: LGPL-2.1-or-later
"""Kernels built here, from Debian's linux-source and the project's config fragments."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from .apt import Archive
from .errors import LabError
from .paths import FIXTURES, cache_folder
from .progress import doing
from .run import BUILD_TOOLS, need, run
from .store import fresh_folder, locked, text_hash, tree_hash, write_atomically

_STAMP = ".lab-source"


def source(series: str, *, refresh: bool = False) -> tuple[Path, str]:
    """The unpacked linux-source of a series, and the package's version."""
    package = f"linux-source-{series}"
    folder = cache_folder("src") / package
    marker = folder / _STAMP
    with locked(package):
        if marker.exists() and not refresh:
            return folder, marker.read_text().strip()
        archive = Archive()
        if package not in archive.names(package):
            raise LabError(f"Debian's archive has no {package} now")
        version = archive.version(package)
        if marker.exists() and marker.read_text().strip() == version:
            return folder, version
        with fresh_folder(folder) as made:
            _unpack(archive, package, made)
            write_atomically(made / _STAMP, version.encode() + b"\n")
        return folder, version


def _unpack(archive: Archive, package: str, folder: Path) -> None:
    deb = archive.download(package, folder)
    run(["dpkg-deb", "-x", deb, folder / "deb"], what=f"unpacking {package}")
    deb.unlink()
    (tarball,) = (folder / "deb" / "usr" / "src").glob(f"{package}.tar.*")
    need("xz")
    untar = ["tar", "-x", "--strip-components=1", "-C", folder, "-f", tarball]
    run(untar, what=f"unpacking {tarball.name}")
    shutil.rmtree(folder / "deb")


def fragment_text(fragments: tuple[str, ...], localversion: str) -> str:
    """The config fragments of a kernel, with the version suffix that tells it apart."""
    paths = [FIXTURES / "kernels" / f"{name}.config" for name in fragments]
    text = "".join(path.read_text() for path in paths)
    return text + f'CONFIG_LOCALVERSION="-{localversion}"\n'


def check_config(fragment: str, config: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Lines of the fragment that did not take effect in the finished config."""
    have = set(config.splitlines())
    missed = []
    for line in fragment.splitlines():
        if not line.startswith("CONFIG_"):
            continue
        name, value = line.split("=", 1)
        wanted = f"# {name} is not set" if value == "n" else line
        absent = value == "n" and not re.search(rf"(?m)^{name}=", config)
        if wanted not in have and not absent and name not in allowed:
            missed.append(line)
    return missed


def configure(tree: Path, output: Path, text: str, *, optional: frozenset[str]) -> None:
    """Write .config from the fragment, when the fragment is another than last time."""
    output.mkdir(parents=True, exist_ok=True)
    written = output / ".lab-fragment"
    if written.exists() and written.read_text() == text and (output / ".config").exists():
        return
    given = output / ".lab-fragment.new"
    given.write_text(text)
    make = ["make", "-C", tree, f"O={output}", "ARCH=x86_64", f"KCONFIG_ALLCONFIG={given}"]
    run([*make, "allnoconfig"], what="configuring the kernel")
    missed = check_config(text, (output / ".config").read_text(), optional)
    if missed:
        raise LabError("the kernel's configuration refused: " + ", ".join(missed))
    given.rename(written)


def compile_kernel(tree: Path, output: Path, name: str) -> None:
    """Build vmlinux, bzImage and modules, going on from what is built already."""
    log = cache_folder("logs") / f"build-{name}.log"
    jobs = max(2, len(os.sched_getaffinity(0)) + 1)
    make = ["make", "-C", tree, f"O={output}", "ARCH=x86_64", f"-j{jobs}"]
    run([*make, "vmlinux", "bzImage", "modules"], what=f"building kernel {name}", log=log)


def collect(output: Path, folder: Path) -> str:
    """Put what the lab needs of a build into `folder`; returns the release."""
    release = (output / "include" / "config" / "kernel.release").read_text().strip()
    with doing(f"copying kernel {release}"):
        shutil.copy2(output / "vmlinux", folder / "vmlinux")
        shutil.copy2(output / "arch" / "x86" / "boot" / "bzImage", folder / "bzImage")
        shutil.copy2(output / ".config", folder / "config")
        modules = folder / "modules"
        modules.mkdir()
        shutil.copy2(output / "modules.builtin", modules / "modules.builtin")
        for line in (output / "modules.order").read_text().split():
            built = output / line.replace(".o", ".ko")
            if built.exists():
                shutil.copy2(built, modules / built.name)
    (folder / "release").write_text(release + "\n")
    return release


def inputs(series_version: str, text: str, patches: list[Path]) -> str:
    """A hash of all that decides how a kernel built here comes out."""
    return text_hash([series_version, text, [tree_hash(patch) for patch in patches]])


def build(
    name: str,
    series: str,
    folder: Path,
    *,
    fragments: tuple[str, ...],
    localversion: str,
    optional: frozenset[str],
    patches: list[Path],
    base: str | None,
    refresh: bool,
) -> dict[str, Any]:
    """Fill `folder` with a kernel built here; returns what it was built from.

    The build tree stays in the cache, so the next build only makes what changed.
    With patches, the source is a patched copy, and the build tree starts as a
    copy of `base`'s.
    """
    need(*BUILD_TOOLS)
    tree, version = source(series, refresh=refresh)
    text = fragment_text(fragments, localversion)
    output = cache_folder("build") / name
    if patches:
        tree = _patched(name, tree, version, patches)
        if base and not output.exists():
            _copy_build(cache_folder("build") / base, output, tree)
    configure(tree, output, text, optional=optional)
    compile_kernel(tree, output, name)
    release = collect(output, folder)
    return {
        "release": release,
        "packages": {f"linux-source-{series}": version},
        "inputs": inputs(version, text, patches),
    }


def _patched(name: str, tree: Path, version: str, patches: list[Path]) -> Path:
    """A copy of the source, patched; files that the patches leave alone are hard links.

    Every file that a patch names becomes a copy first, so that nothing can be
    written through a link into the shared source.
    """
    need("patch")
    target = cache_folder("src") / name
    marker = target / _STAMP
    wanted = inputs(version, "", patches) + "\n"
    if marker.exists() and marker.read_text() == wanted:
        return target
    touched = set()
    for patch in patches:
        touched |= set(re.findall(r"(?m)^(?:---|\+\+\+) [ab]/(\S+)", patch.read_text()))
    with fresh_folder(target) as made:
        run(["cp", "-al", f"{tree}/.", made], what=f"copying the source for {name}")
        (made / _STAMP).unlink(missing_ok=True)
        for path in touched:
            if (made / path).exists():
                (made / path).unlink()
                shutil.copy2(tree / path, made / path)
        for patch in patches:
            run(["patch", "-p1", "-s", "-d", made, "-i", patch], what=f"applying {patch.name}")
        _keep_times(target, made, touched)
        write_atomically(made / _STAMP, wanted.encode())
    return target


def _keep_times(old: Path, new: Path, touched: set[str]) -> None:
    # make goes by times: a file that comes out as before must not look new
    for path in touched:
        before, after = old / path, new / path
        if before.exists() and after.exists() and before.read_bytes() == after.read_bytes():
            stat = before.stat()
            os.utime(after, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _copy_build(base: Path, output: Path, tree: Path) -> None:
    with fresh_folder(output) as made:
        copy = ["cp", "-a", "--reflink=auto", f"{base}/.", made]
        run(copy, what=f"copying the build of {base.name}")
        link = made / "source"
        link.unlink(missing_ok=True)
        link.symlink_to(tree)
