# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Units of systemd
----------------

The service reports on dumps after the boot that follows a crash. It never delays that boot: without
default dependencies, ``multi-user.target`` does not wait for a service that it wants. The path unit
starts it if a dump arrives later, as on a machine that collects those of others.
"""

from __future__ import annotations

import re
from pathlib import Path

from memcg_inspect.crash.dumps import CRASHES
from memcg_inspect.files import write_file
from memcg_inspect.model import MemcgInspectError

__all__ = ("FOLDER", "UNITS", "install")

FOLDER = "etc/systemd/system"
_PLAIN = re.compile(r"[\w%$./:=@+-]+", re.ASCII)

_SERVICE = """\
# SPDX-License-Identifier: LGPL-2.1-or-later
# Made by memcg-inspect crash install.
[Unit]
Description=Reports on crash dumps: memory accounting of cgroups
Documentation=man:memcg-inspect(1)
# Not in the kernel that saves a dump, and not in the way of booting.
ConditionPathExists=!/proc/vmcore
ConditionDirectoryNotEmpty={crashes}
RequiresMountsFor={crashes}
DefaultDependencies=no
Requires=sysinit.target
After=sysinit.target basic.target kdump-tools.service kdump.service
Conflicts=shutdown.target
Before=shutdown.target

[Service]
Type=oneshot
ExecStart={command}
# There are findings, or not everything could be read.
SuccessExitStatus=1 3
# For the message of the day, which stays.
RuntimeDirectory=motd.d
RuntimeDirectoryPreserve=yes
# A dump that is flattened or compressed is copied here for the time of its audit.
CacheDirectory=memcg-inspect
Environment=TMPDIR=/var/cache/memcg-inspect
Environment=XDG_CACHE_HOME=/var/cache/memcg-inspect
Environment=MEMCG_INSPECT_COPIES=0
TimeoutStartSec=infinity
CPUSchedulingPolicy=idle
IOSchedulingClass=idle
MemoryMax=50%
OOMPolicy=continue
# What a dump says is not trusted.
ProtectSystem=strict
ReadWritePaths={crashes}
ProtectHome=read-only
PrivateTmp=yes
PrivateNetwork=yes
PrivateDevices=yes
NoNewPrivileges=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
CapabilityBoundingSet=CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER

[Install]
WantedBy=multi-user.target
"""

_PATH = """\
# SPDX-License-Identifier: LGPL-2.1-or-later
# Made by memcg-inspect crash install.
[Unit]
Description=Watches for crash dumps that arrive
ConditionPathExists=!/proc/vmcore

[Path]
PathChanged={crashes}

[Install]
WantedBy=multi-user.target
"""

#: The units, by name.
UNITS = {"memcg-inspect-crash.service": _SERVICE, "memcg-inspect-crash.path": _PATH}


def install(root: str, python: str, crashes: str = CRASHES) -> list[Path]:
    """
    Write the units, and enable them.

    :param root: directory of the system that they are for: ``/``
    :param python: absolute path of its Python, which has this package
    :return: the files that were made
    :raises MemcgInspectError: if one cannot be written
    """
    words = [python, "-m", "memcg_inspect", "crash", "report", "--settle", "60", crashes]
    command = " ".join(map(_quoted, words))
    folder, made = Path(root) / FOLDER, []
    wants = folder / "multi-user.target.wants"
    try:
        wants.mkdir(parents=True, exist_ok=True)
        if not wants.resolve().is_relative_to(Path(root).resolve()):
            raise MemcgInspectError(f"{wants} leads out of {root}")
        for name, text in UNITS.items():
            path, link = folder / name, wants / name
            if path.is_symlink():
                raise MemcgInspectError(f"{path} is a link: it is masked, or not from here")
            write_file(str(path), text.format(crashes=crashes, command=command))
            link.unlink(missing_ok=True)
            link.symlink_to(f"../{name}")
            made += [path, link]
    except OSError as error:
        raise MemcgInspectError(f"{error.filename}: {error.strerror}") from None
    return made


def _quoted(word: str) -> str:
    """Return a word as ``ExecStart=`` reads it, see :manpage:`systemd.service(5)`."""
    text = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(text):
        return text
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'
