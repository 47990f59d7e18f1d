# SPDX-License-Identifier: LGPL-2.1-or-later
"""Run programs of this machine, and name those that are missing."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .errors import LabError
from .progress import doing

# Programs and headers that the lab needs, and the Debian packages that have them.
PACKAGES = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "apt-get": "apt",
    "bc": "bc",
    "bison": "bison",
    "busybox": "busybox-static",
    "chroot": "coreutils",
    "dpkg-deb": "dpkg",
    "flex": "flex",
    "gcc": "gcc",
    "lz4": "lz4",
    "make": "make",
    "mke2fs": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "makedumpfile": "makedumpfile",
    "pahole": "dwarves",
    "patch": "patch",
    "readelf": "binutils",
    "powerpc64le-linux-gnu-gcc": "gcc-powerpc64le-linux-gnu",
    "s390x-linux-gnu-gcc": "gcc-s390x-linux-gnu",
    "qemu-system-aarch64": "qemu-system-arm",
    "qemu-system-ppc64": "qemu-system-ppc",
    "qemu-system-s390x": "qemu-system-misc",
    "qemu-system-x86_64": "qemu-system-x86",
    "unshare": "util-linux",
    "virtiofsd": "virtiofsd",
    "xz": "xz-utils",
    "zstd": "zstd",
    "/usr/aarch64-linux-gnu/include/stdio.h": "libc6-dev-arm64-cross",
    "/usr/powerpc64le-linux-gnu/include/stdio.h": "libc6-dev-ppc64el-cross",
    "/usr/s390x-linux-gnu/include/stdio.h": "libc6-dev-s390x-cross",
    "/usr/include/gelf.h": "libelf-dev",
    "/usr/include/openssl/ssl.h": "libssl-dev",
    "/usr/include/stdio.h": "libc6-dev",
}

# Programs that are not in PATH; the folder differs between releases of Debian.
_ELSEWHERE = {"virtiofsd": ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd")}

_PR_SET_PDEATHSIG = 1

FETCH_TOOLS = ("apt-get", "dpkg-deb", "xz")
BUILD_TOOLS = (
    "gcc", "make", "flex", "bison", "bc", "lz4", "pahole", "patch", "unshare",
    "/usr/include/gelf.h", "/usr/include/openssl/ssl.h", "/usr/include/stdio.h",
)  # fmt: skip


def find(tool: str) -> str | None:
    """Return the path of a program (also in the sbin folders) or of a file; None if missing."""
    if tool.startswith("/"):
        return tool if os.path.exists(tool) else None
    for place in _ELSEWHERE.get(tool, ()):
        if os.access(place, os.X_OK):
            return place
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/bin:/bin"
    return shutil.which(tool, path=path)


def need(*tools: str) -> None:
    """Raise one LabError that names all missing programs and the command to install them."""
    missing = [tool for tool in tools if not find(tool)]
    if not missing:
        return
    packages = sorted({PACKAGES[tool] for tool in missing})
    raise LabError(
        f"missing on this machine: {', '.join(missing)}\n"
        f"install with: sudo apt-get install -y {' '.join(packages)}"
    )


def tool(name: str) -> str:
    """Return the path of a program, or raise LabError."""
    need(name)
    path = find(name)
    assert path is not None
    return path


def dies_with_lab() -> None:
    """Make a child process get SIGKILL when the lab is killed (PR_SET_PDEATHSIG).

    In all other cases the lab ends its children itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(
    command: Sequence[object],
    *,
    what: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> str:
    """Run a command to its end and return its standard output.

    :param what: what the command does, for progress and errors
    :param log: a file for all output; then "" is returned
    :raises LabError: with the last lines of the output, if the command fails
    """
    words = [str(word) for word in command]
    with contextlib.ExitStack() as stack:
        stack.enter_context(doing(what))
        out: IO[bytes] | int = (
            subprocess.PIPE if log is None else stack.enter_context(log.open("wb"))
        )
        process = stack.enter_context(
            ending_all(
                words, cwd=cwd, env=env, text=True, errors="replace", stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
            )
        )  # fmt: skip
        output, errors = process.communicate()
    if process.returncode:
        shown = errors + output if log is None else log.read_text(errors="replace")
        raise LabError(_failure(what, words, process.returncode, shown, log))
    return output or ""


@contextlib.contextmanager
def ending_all(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command. If it still runs after the block, all that it started ends, too.

    An interrupted make alone would leave compilers.
    """
    process = subprocess.Popen(words, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(what: str, words: Sequence[str], status: int, shown: str, log: Path | None) -> str:
    tail = "\n".join(f"  {line}" for line in shown.strip().splitlines()[-25:])
    where = f"\nall of the output: {log}" if log else ""
    return f"{what}: {words[0]} failed with status {status}:\n{tail}{where}"
