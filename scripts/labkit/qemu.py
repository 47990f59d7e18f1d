# SPDX-License-Identifier: LGPL-2.1-or-later
"""A QEMU process, its monitor (QMP) and its serial ports."""

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from .arch import Arch
from .errors import GuestError, LabError
from .run import dies_with_lab, tool


class _NotStarted(Exception):
    """QEMU ended before the guest began to boot, or does not answer."""


class Monitor:
    """A QMP connection (QEMU's docs/interop/qmp-spec)."""

    def __init__(self, path: Path, *, timeout: float = 120.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rwb")
        self._read()
        self.call("qmp_capabilities")

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise GuestError("QEMU closed its monitor")
        message: dict[str, Any] = json.loads(line)
        return message

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a QMP command and return its result.

        :raises LabError: if QEMU refuses it
        """
        request: dict[str, Any] = {"execute": command}
        if arguments:
            request["arguments"] = arguments
        try:
            self._file.write(json.dumps(request).encode() + b"\n")
            self._file.flush()
        except OSError:
            raise GuestError("QEMU closed its monitor") from None
        while True:
            message = self._read()
            if "return" in message:
                return message["return"]
            if "error" in message:
                raise LabError(f"QEMU refused {command}: {message['error']['desc']}")

    def human(self, command: str) -> str:
        """Run a command of the human monitor and return its output."""
        return str(self.call("human-monitor-command", **{"command-line": command}))

    def registers(self) -> str:
        """Return the registers of all CPUs, as text for people."""
        return self.human("info registers -a")

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):  # of what could not be written
            self._file.close()
        self._socket.close()


class Ports:
    """The host's ends of the guest's virtio-serial ports: sockets made before QEMU starts."""

    def __init__(self, folder: Path, names: tuple[str, ...], bus: str) -> None:
        self.names, self._bus = names, bus
        self._listeners = {}
        for name in names:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / f"{name}.sock"))
            listener.listen(1)
            self._listeners[name] = listener
        self._folder = folder

    def qemu_args(self) -> list[str]:
        """Return QEMU's options for these ports."""
        args = ["-device", f"virtio-serial-{self._bus},max_ports=8"]
        for name in self.names:
            args += ["-chardev", f"socket,id={name},path={self._folder / name}.sock"]
            args += ["-device", f"virtserialport,chardev={name},name=lab.{name}"]
        return args

    def accept(self, process: "subprocess.Popen[bytes]") -> dict[str, socket.socket]:
        """Accept QEMU's connections, and return them by the name of the port."""
        found = {}
        for name, listener in self._listeners.items():
            listener.settimeout(0.2)
            while name not in found:
                try:
                    found[name] = listener.accept()[0]
                except TimeoutError:
                    if process.poll() is not None:
                        raise _NotStarted from None
            listener.close()
        return found


class Qemu:
    """A QEMU process. close() ends it.

    :raises LabError: if QEMU refuses the options
    """

    def __init__(self, args: list[str], ports: tuple[str, ...], arch: Arch) -> None:
        self.arch = arch
        self._folder = tempfile.TemporaryDirectory(prefix="lab.")
        self.folder = Path(self._folder.name)
        made = Ports(self.folder, ports, arch.bus)
        self._kept: list[socket.socket] = []
        self.console_path = self.folder / "console"
        self._errors = self.folder / "qemu.err"
        monitor = self.folder / "qmp.sock"
        # TCG counts instructions (-icount) in one thread only.
        threads = "single" if "-icount" in args else "multi"
        told = ["-device", "vmcoreinfo"] if arch.has_vmcoreinfo else []
        command = [
            tool(arch.qemu), *arch.machine, "-no-user-config", "-nodefaults", "-display", "none",
            "-accel", f"tcg,thread={threads}", "-no-reboot", *told,
            "-serial", f"file:{self.console_path}", "-qmp", f"unix:{monitor},server=on,wait=off",
            *made.qemu_args(), *args,
        ]  # fmt: skip
        with open(self._errors, "wb") as errors:
            # In a session of its own QEMU gets no Ctrl-C: the lab gets it and ends QEMU.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                start_new_session=True,
                preexec_fn=dies_with_lab,
            )  # fmt: skip
        try:
            self.ports = made.accept(self.process)
            self.monitor = self._connect(monitor)
        except (_NotStarted, OSError):
            shown = self._errors.read_text(errors="replace").strip().splitlines()
            self.close()
            why = shown[-1] if shown else "it gave no reason"
            raise LabError(f"QEMU did not start: {why}") from None
        except BaseException:
            self.close()
            raise

    def _connect(self, path: Path) -> Monitor:
        end = time.monotonic() + 30
        while True:
            try:
                return Monitor(path)
            except (FileNotFoundError, ConnectionRefusedError, GuestError):
                if self.process.poll() is not None or time.monotonic() > end:
                    raise _NotStarted from None
                time.sleep(0.02)

    def keep(self, connection: socket.socket) -> None:
        """Close a connection when QEMU ends, and not before."""
        self._kept.append(connection)

    def console(self) -> str:
        """Return everything that the guest has written to its console."""
        try:
            return self.console_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        """End QEMU and remove its files."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for port in (*getattr(self, "ports", {}).values(), *self._kept):
            port.close()
        if hasattr(self, "monitor"):
            self.monitor.close()
        self._folder.cleanup()
