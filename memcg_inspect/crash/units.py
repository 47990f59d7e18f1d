# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Units of systemd
----------------

The service reports on dumps after the boot that follows a crash. A timer starts it, so it is no job
of the boot, which ends without it. The timer starts it again later, and the path unit does when
something appears in the directory, as on a machine that collects the dumps of others.
"""

from __future__ import annotations

import re
from pathlib import Path

from memcg_inspect.crash.dumps import CRASHES
from memcg_inspect.files import write_file
from memcg_inspect.model import MemcgInspectError

__all__ = ("FOLDER", "STARTED", "UNITS", "install")

FOLDER = "etc/systemd/system"
_WANTED_BY = re.compile(r"^WantedBy=(\S+)$", re.MULTILINE)
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
# Anybody may be able to make files in there.
StartLimitIntervalSec=0
RequiresMountsFor={crashes}
DefaultDependencies=no
Requires=sysinit.target
After=sysinit.target basic.target kdump-tools.service kdump.service
Conflicts=shutdown.target
Before=shutdown.target

[Service]
Type=oneshot
ExecStart={command}
# There are findings, not everything could be read, or it was stopped.
SuccessExitStatus=1 3 143
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
UMask=0077
IPAddressDeny=any
ProtectProc=invisible
PrivateIPC=yes
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
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
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER
"""

_TIMER = """\
# SPDX-License-Identifier: LGPL-2.1-or-later
# Made by memcg-inspect crash install.
[Unit]
Description=Looks for crash dumps after the boot, and from time to time
ConditionPathExists=!/proc/vmcore

[Timer]
OnBootSec=1min
OnUnitInactiveSec=1h

[Install]
WantedBy=timers.target
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
WantedBy=paths.target
"""

#: The units, by name.
UNITS = {
    "memcg-inspect-crash.service": _SERVICE,
    "memcg-inspect-crash.timer": _TIMER,
    "memcg-inspect-crash.path": _PATH,
}
#: Those that are started when they are installed.
STARTED = ("memcg-inspect-crash.timer", "memcg-inspect-crash.path")


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
    try:
        for name, text in UNITS.items():
            path = folder / name
            if path.is_symlink():
                raise MemcgInspectError(f"{path} is a link: it is masked, or not from here")
            _make_folder(folder, root)
            write_file(str(path), text.format(crashes=crashes, command=command))
            made.append(path)
            for target in _WANTED_BY.findall(text):
                wants = folder / f"{target}.wants"
                _make_folder(wants, root)
                link = wants / name
                link.unlink(missing_ok=True)
                link.symlink_to(f"../{name}")
                made.append(link)
    except OSError as error:
        raise MemcgInspectError(f"{error.filename}: {error.strerror}") from None
    return made


def _make_folder(folder: Path, root: str) -> None:
    """:raises MemcgInspectError: if a link leads out of the system"""
    if not folder.resolve().is_relative_to(Path(root).resolve()):
        raise MemcgInspectError(f"{folder} leads out of {root}")
    folder.mkdir(parents=True, exist_ok=True)


def _quoted(word: str) -> str:
    """Return a word as ``ExecStart=`` reads it, see :manpage:`systemd.service(5)`."""
    text = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(text):
        return text
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'
