# SPDX-License-Identifier: LGPL-2.1-or-later
"""Fetch and unpack Debian's kernels."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .apt import Archive
from .errors import LabError
from .progress import doing
from .run import run


def newest_release(names: set[str], series: str, flavour: str = "cloud-amd64") -> str:
    """Return the newest release of a series that has an image, and if possible debug info."""
    return releases(names, series, flavour)[0]


def releases(names: set[str], series: str, flavour: str) -> list[str]:
    """Return the releases of a series that have an image, the newest with debug info first.

    :param flavour: Debian's name of the configuration and the architecture
    """
    pattern = re.compile(
        rf"linux-(?:image|binary-unsigned|binary)-({re.escape(series)}\.[^-]*(?:-\d+)?-{flavour})"
        r"(?:-unsigned)?$"
    )
    found = {match[1] for name in names if (match := pattern.match(name))}
    bootable = [release for release in found if image_packages(names, release)]
    if not bootable:
        raise LabError(f"Debian's archive has no {flavour} kernel {series} now")
    return sorted(
        bootable,
        key=lambda name: (debug_package(name) in names, [int(n) for n in re.findall(r"\d+", name)]),
        reverse=True,
    )


def image_packages(names: set[str], release: str) -> list[str]:
    """Return the packages with kernel, modules and config of a release; [] if one is missing."""
    signed = signed_package(release)
    for wanted in (
        [f"linux-image-{release}-unsigned"],
        [f"linux-binary-unsigned-{release}", f"linux-modules-{release}", f"linux-base-{release}"],
        [signed, f"linux-modules-{release}", f"linux-base-{release}"],
        # Since 6.19, linux-image depends on the packages above and is empty.
        [f"linux-image-{release}"] if signed not in names else [signed],
    ):
        if names.issuperset(wanted):
            return wanted
    return []


def signed_package(release: str) -> str:
    """Return the package with the signed kernel of a release, since 6.19 without its modules."""
    return f"linux-binary-{release}"


def debug_package(release: str) -> str:
    """Return the package with the debug info of a release."""
    return f"linux-image-{release}-dbg"


def fetch(series: str, flavour: str, arch: str, folder: Path) -> dict[str, Any]:
    """Fill `folder` with the newest kernel of `series`, without its debug info.

    Of series that left the archive, it may keep only the signed kernel. Such a kernel boots without
    modules, and its configuration is empty.

    :return: release and packages
    """
    archive = Archive(arch)
    names = archive.names("linux-")
    release, debs = _downloaded(archive, names, releases(names, series, flavour), folder)
    packages = list(debs)
    versions = {package: archive.version(package) for package in packages}
    parts = folder / "unpacked"
    parts.mkdir()
    for package, deb in debs.items():
        run(["dpkg-deb", "-x", deb, parts], what=f"unpack {package}")
        deb.unlink()
    newer = f"usr/lib/modules/{release}"
    names_of_image = ("boot/vmlinuz-" + release, "boot/vmlinux-" + release)
    image = [*names_of_image, f"{newer}/vmlinuz.unsigned", f"{newer}/vmlinuz"]
    _take(parts, image, folder / "bzImage")
    if packages == [signed_package(release)]:
        (folder / "config").touch()
        (folder / "modules").mkdir()
    else:
        _take(parts, [f"boot/config-{release}", f"{newer}/config"], folder / "config")
        _take(parts, [f"lib/modules/{release}", newer], folder / "modules")
    run(["rm", "-rf", parts], what="clean up")
    (folder / "release").write_text(release + "\n")
    return {"release": release, "packages": versions}


def _downloaded(
    archive: Archive, names: set[str], candidates: list[str], folder: Path
) -> tuple[str, dict[str, Path]]:
    """Download the packages of the first release that the mirror has as its lists say."""
    for release in candidates:
        try:
            packages = image_packages(names, release)
            return release, {package: archive.download(package, folder) for package in packages}
        except LabError as error:
            if release == candidates[-1]:
                raise
            print(f"lab: {str(error).splitlines()[0]}; trying an older one", file=sys.stderr)
    raise LabError("no release to download")


def fetch_vmlinux(facts: Mapping[str, Any], arch: str, target: Path) -> None:
    """Fetch the vmlinux with debug info of a kernel that fetch() fetched.

    The caller holds the lock of the kernel.
    """
    release = facts["release"]
    package = debug_package(release)
    # All binary packages of one build have the same version.
    wanted = next(iter(facts["packages"].values()))
    archive = Archive(arch)
    if archive.version(package) != wanted:
        raise LabError(
            f"Debian's archive has no {package} {wanted} any more; "
            "fetch a newer kernel with: lab kernel NAME --refresh"
        )
    # Leftovers are from runs that were killed: this one holds the lock.
    for left in target.parent.glob(".vmlinux.*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".vmlinux.", dir=target.parent) as folder:
        deb = archive.download(package, Path(folder))
        made = Path(folder) / "vmlinux"
        _extract_vmlinux(deb, release, made)
        made.replace(target)


def _take(parts: Path, candidates: list[str], target: Path) -> None:
    for name in candidates:
        if (parts / name).exists():
            (parts / name).rename(target)
            return
    raise LabError(f"Debian's packages contain none of {', '.join(candidates)}")


def _extract_vmlinux(deb: Path, release: str, target: Path) -> None:
    # Extract one file from the stream: the whole package takes gigabytes.
    wanted = [
        f"./usr/lib/debug/lib/modules/{release}/vmlinux",
        f"./usr/lib/debug/boot/vmlinux-{release}",
    ]
    with doing(f"extract vmlinux {release} from its package"), open(target, "wb") as out:
        data = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE)
        # tar fails because only one of the two names is in the archive.
        subprocess.run(
            ["tar", "-xO", "--ignore-failed-read", *wanted],
            stdin=data.stdout, stdout=out, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert data.stdout is not None
        data.stdout.close()
        if data.wait():
            raise LabError(f"dpkg-deb cannot unpack {deb.name}")
    if target.stat().st_size == 0:
        raise LabError(f"{deb.name} holds no vmlinux in /usr/lib/debug")
