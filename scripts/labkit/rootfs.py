# SPDX-License-Identifier: LGPL-2.1-or-later
"""Disks with Debian's root file system, its kernel and kdump-tools, as they come.

mmdebstrap makes the file system. kdump-tools is installed in the booted guest, since it makes its
initramfs for the devices that it finds, and reads there how much memory to reserve.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import topology
from .apt import Archive, lab_sources, system_targets
from .arch import arch
from .debian import newest_release
from .errors import LabError
from .guest import PORTS, Guest
from .paths import cache_folder
from .programs import GUEST
from .qemu import Qemu
from .run import need, run, tool
from .store import (
    fresh_folder,
    locked,
    read_stamp,
    text_hash,
    tree_hash,
    write_atomically,
    write_stamp,
)

# The suite of a series of kernels. Others are in the backports of the newest suite, and need the
# linux-base from there.
_SUITES = {"6.1": "bookworm", "6.12": "trixie"}
_NEWEST = "trixie"
_BACKPORTS = f"linux-base/{_NEWEST}-backports"
_PACKAGES = (
    "systemd-sysv", "udev", "dbus", "login", "kmod", "initramfs-tools", "util-linux",
    "python3", "python3-venv", "bzip2", "lz4", "xz-utils", "zstd",
)  # fmt: skip
_DISK = "4G"
_MEMORY = "2G"
_COMMAND_LINE = "root=/dev/vda rw console=ttyS0 loglevel=5 no_timer_check"
# Under TCG on a busy machine systemd takes a minute.
_BOOT_SECONDS = 600.0
_INSTALL = """\
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
apt-get install -q -y --no-download --install-recommends kdump-tools
cat /etc/default/grub.d/kdump-tools.cfg
"""
_UNIT = """\
[Unit]
Description=Runs the scripts that the lab sends
After=multi-user.target
ConditionPathExists=!/proc/vmcore

[Service]
ExecStart=/bin/sh /usr/local/lib/lab/agent
Environment=HOME=/root LC_ALL=C.UTF-8

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Disk:
    """A disk in the cache. copied() makes one that a guest may write to."""

    folder: Path
    facts: dict[str, Any]

    @property
    def release(self) -> str:
        """The release of its kernel."""
        return str(self.facts["release"])

    @property
    def python(self) -> str:
        """The version of its Python, such as "3.11"."""
        return str(self.facts["python"])

    @property
    def crashkernel(self) -> str:
        """The option by which kdump-tools reserves memory."""
        return str(self.facts["crashkernel"])


def disk(series: str, modules: Sequence[Path] = ()) -> Disk:
    """Return the disk with Debian's newest kernel of a series; make it if it is missing.

    :param modules: folders of test modules, which Debian's own compiler builds for it
    """
    target = cache_folder("disks") / "-".join([series, *(module.name for module in modules)])
    parts = [_PACKAGES, _UNIT, _INSTALL, (GUEST / "agent").read_text(), tree_hash(*modules)]
    made_of = text_hash(parts)
    with locked(f"disk-{target.name}"):
        facts = read_stamp(target)
        if facts is None or facts["made_of"] != made_of:
            with fresh_folder(target) as folder:
                facts = {"made_of": made_of, **_make(series, modules, folder)}
                write_stamp(folder, facts)
    return Disk(target, facts)


def _make(series: str, modules: Sequence[Path], folder: Path) -> dict[str, Any]:
    need("mmdebstrap", "mke2fs", "qemu-system-x86_64", "unshare")
    if os.geteuid() != 0:
        raise LabError("only root can make a disk with Debian on it: files of several users")
    release = newest_release(Archive().names("linux-"), series)
    suite = _SUITES.get(series, _NEWEST)
    kernel = [f"linux-image-{release}", *([] if series in _SUITES else [_BACKPORTS])]
    if modules:
        kernel += ["gcc", "make", f"linux-headers-{release}"]
    with tempfile.TemporaryDirectory(prefix="root.", dir=folder) as name:
        root = Path(name)
        _bootstrap(suite, kernel, root)
        for module in modules:
            _build_module(module, release, root)
        for kind in ("vmlinuz", "initrd.img"):
            shutil.copy(root / f"boot/{kind}-{release}", folder / kind)
        (python,) = (root / "usr/bin").glob("python3.?*[0-9]")
        write_disk(root, folder / "disk", _DISK)
    facts = {"release": release, "suite": suite, "python": python.name.removeprefix("python")}
    return {**facts, "crashkernel": _install_kdump(Disk(folder, {**facts, "crashkernel": ""}))}


def _install_kdump(made: Disk) -> str:
    """Install kdump-tools on a disk; return the option by which it reserves memory."""
    disk = made.folder / "disk"
    with booted(made, disk) as guest:
        said = guest.must(_INSTALL, what="install kdump-tools", timeout=_BOOT_SECONDS).decode()
        options = re.findall(r"crashkernel=[^\s\"']+", said)
        if not options:
            raise guest.fail("kdump-tools reserves no memory")
        power_off(guest)
    # It makes its initramfs when it first finds memory reserved.
    with booted(replace(made, facts={**made.facts, "crashkernel": options[-1]}), disk) as guest:
        guest.must("kdump-config status", what="load the crash kernel")
        power_off(guest)
    return str(options[-1])


def _bootstrap(suite: str, kernel: Sequence[str], root: Path) -> None:
    """Fill an empty folder with Debian, and the lab's agent."""
    sources = cache_folder("apt", "roots") / f"{suite}.sources"
    write_atomically(sources, lab_sources(system_targets(), suite).encode())
    log = cache_folder("logs") / f"rootfs-{suite}.log"
    hooks = ['chroot "$1" apt-get install -q -y -d --install-recommends kdump-tools']
    run(
        [
            # What it mounts in there must never be seen by what removes the folder.
            tool("unshare"), "--mount", "--fork", "--kill-child",
            tool("mmdebstrap"), "--mode=root", "--variant=minbase", "--skip=cleanup/apt",
            f"--include={','.join((*_PACKAGES, *kernel))}",
            *(f"--customize-hook={hook}" for hook in hooks), suite, root, sources,
        ],
        what=f"make a root file system of Debian {suite}", log=log,
    )  # fmt: skip
    lab = root / "usr/local/lib/lab"
    lab.mkdir(parents=True)
    shutil.copy(GUEST / "agent", lab / "agent")
    units = root / "etc/systemd/system"
    (units / "lab-agent.service").write_text(_UNIT)
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "lab-agent.service").symlink_to("../lab-agent.service")
    (root / "etc/hostname").write_text("lab\n")


def _build_module(module: Path, release: str, root: Path) -> None:
    """Build a test module as a user of this Debian would."""
    source = root / "usr/local/src" / module.name
    shutil.copytree(module, source)
    what = f"build module {module.name} for {release}"
    inside = f"/{source.relative_to(root)}"
    command = ["make", "-C", f"/lib/modules/{release}/build", f"M={inside}", "modules"]
    run([tool("chroot"), root, *command], what=what)
    shutil.copy(source / f"{module.name}.ko", root / "usr/local/lib/lab")


def write_disk(folder: Path, path: Path, size: str) -> None:
    """Write the content of a folder to a new disk (ext4)."""
    need("mke2fs")
    command = [tool("mke2fs"), "-q", "-t", "ext4", "-d", folder, path, size]
    run(command, what="write a disk")


@contextlib.contextmanager
def copied(made: Disk) -> Iterator[Path]:
    """Return a copy of a disk that lives as long as the block."""
    with tempfile.TemporaryDirectory(prefix="lab.") as name:
        path = Path(name) / "disk"
        run(["cp", "--sparse=always", made.folder / "disk", path], what="copy a disk")
        yield path


@contextlib.contextmanager
def booted(
    made: Disk, path: Path, *, also: Sequence[Path] = (), append: str = "", nodes: str = "2"
) -> Iterator[Guest]:
    """Boot a guest from a disk, until its services have started. End it with the block.

    :param also: disks that it can read, ``/dev/vdb`` and so on
    """
    disks = [f"file={path},format=raw,if=virtio,cache=unsafe"]
    disks += [f"file={one},format=raw,if=virtio,readonly=on" for one in also]
    args = [
        "-kernel", str(made.folder / "vmlinuz"), "-initrd", str(made.folder / "initrd.img"),
        "-append", f"{_COMMAND_LINE} {made.crashkernel} {append}".strip(),
        *topology.parse(nodes, memory=topology.parse_size(_MEMORY)).qemu_args(),
        *(word for one in disks for word in ("-drive", one)),
    ]  # fmt: skip
    with contextlib.closing(Qemu(args, PORTS, arch("amd64"))) as qemu:
        yield Guest(qemu, timeout=_BOOT_SECONDS)


def power_off(guest: Guest) -> None:
    """Shut a guest down, and wait until it has ended."""
    guest.end_by("systemctl poweroff", timeout=_BOOT_SECONDS, what="shut the guest down")
