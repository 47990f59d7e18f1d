# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Units of systemd
----------------

The service reports on dumps after the boot that follows a crash. It never delays that boot: without
default dependencies, ``multi-user.target`` does not wait for a service that it wants. The path unit
starts it if a dump arrives later, as on a machine that collects those of others.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from memcg_inspect.crash.dumps import CRASHES
from memcg_inspect.files import write_file

__all__ = ("FOLDER", "UNITS", "install")

FOLDER = "etc/systemd/system"

_SERVICE = """\
# SPDX-License-Identifier: LGPL-2.1-or-later
# Made by memcg-inspect crash install.
[Unit]
Description=Reports on crash dumps: memory accounting of cgroups
Documentation=man:memcg-inspect(1)
# Not in the kernel that saves a dump, and not in the way of booting.
ConditionPathExists=!/proc/vmcore
ConditionDirectoryNotEmpty={crashes}
DefaultDependencies=no
Requires=sysinit.target
After=sysinit.target basic.target kdump-tools.service kdump.service
Conflicts=shutdown.target
Before=shutdown.target

[Service]
Type=oneshot
ExecStartPre=+/bin/mkdir -p /run/motd.d
ExecStart={command}
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
ReadWritePaths={crashes} /run/motd.d
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
    words = [python, "-m", "memcg_inspect", "crash", "report", crashes]
    folder, made = Path(root) / FOLDER, []
    for name, text in UNITS.items():
        path = folder / name
        write_file(str(path), text.format(crashes=crashes, command=shlex.join(words)))
        made.append(path)
        wants = folder / "multi-user.target.wants"
        wants.mkdir(parents=True, exist_ok=True)
        link = wants / name
        link.unlink(missing_ok=True)
        link.symlink_to(f"../{name}")
        made.append(link)
    return made
