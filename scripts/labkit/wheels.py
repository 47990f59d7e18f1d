# SPDX-License-Identifier: LGPL-2.1-or-later
"""A disk with the package and what it needs, from which pip of a guest installs without network."""

import shutil
import sys
from pathlib import Path

from .paths import PROJECT
from .rootfs import write_disk
from .run import run

_SIZE = "200M"
_NOT_COPIED = (".*", "__pycache__", "build", "*.egg-info")
# Makes pip take packages from there.
SETUP = """\
set -e
mkdir -p /mnt/wheels
mount -o ro /dev/vdb /mnt/wheels
printf '[global]\\nno-index = true\\nfind-links = /mnt/wheels\\n' >/etc/pip.conf
"""


def wheel_disk(folder: Path, python: str) -> Path:
    """Make a disk in an empty folder.

    :param python: the guest's version of Python, such as "3.11"
    """
    wheels = folder / "wheels"
    wheels.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    # The build writes into the source. Another process may be building it at the same time.
    source = folder / "source"
    shutil.copytree(PROJECT, source, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    run([*pip, "wheel", "--no-deps", "-w", wheels, source], what="build the package")
    (own,) = wheels.glob("*.whl")
    # Those of another version of Python than this one are to be had as wheels only.
    wanted = ["--only-binary=:all:", "--python-version", python, own]
    run([*pip, "download", "-d", wheels, *wanted], what="download what the package needs")
    write_disk(wheels, folder / "disk", _SIZE)
    return folder / "disk"
