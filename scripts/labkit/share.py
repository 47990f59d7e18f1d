# SPDX-License-Identifier: LGPL-2.1-or-later
"""Share this machine's files with a guest, read-only, through 9p or virtiofs."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError
from .kernels import Kernel
from .run import dies_with_lab, find, need

_MOUNT_9P = (
    "mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose,access=any host /host"
)
_MOUNT_VIRTIOFS = "mount -t virtiofs -o ro host /host"


@dataclass(frozen=True)
class Share:
    """How to share the files: QEMU's options, and the mount command of the guest."""

    args: list[str]
    shared_memory: bool
    mount: str


def _need_virtiofsd() -> str:
    need("virtiofsd")
    program = find("virtiofsd")
    assert program is not None
    return program


@contextlib.contextmanager
def shared(kernel: Kernel) -> Iterator[Share]:
    """Yield a share that `kernel` can mount. It ends with the block."""
    if "CONFIG_NET_9P_VIRTIO" in kernel.config:
        option = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
        yield Share(["-virtfs", option], False, _MOUNT_9P)
    elif "CONFIG_VIRTIO_FS" in kernel.config:
        with tempfile.TemporaryDirectory(prefix="lab.") as folder, _virtiofsd(Path(folder)) as path:
            args = ["-chardev", f"socket,id=fs,path={path}"]
            args += ["-device", "vhost-user-fs-pci,chardev=fs,tag=host"]
            yield Share(args, True, _MOUNT_VIRTIOFS)
    else:
        raise LabError(f"kernel {kernel.name} can mount neither 9p nor virtiofs")


@contextlib.contextmanager
def _virtiofsd(folder: Path) -> Iterator[Path]:
    program = _need_virtiofsd()
    path = folder / "fs.sock"
    # QEMU's virtiofsd (in C) and its successor (in Rust) have different options.
    if program.startswith("/usr/lib/qemu/"):
        command = [program, f"--socket-path={path}", "-o", "source=/,cache=always,sandbox=chroot"]
    else:
        command = [program, "--socket-path", str(path), "--shared-dir", "/", "--cache", "always"]
        command += ["--sandbox", "chroot"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=dies_with_lab,
        )
    try:
        for _ in range(200):
            if path.exists() or process.poll() is not None:
                break
            time.sleep(0.02)
        if not path.exists():
            said = (folder / "log").read_text(errors="replace").strip()
            raise LabError(f"virtiofsd did not start: {said}")
        yield path
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
