# SPDX-License-Identifier: LGPL-2.1-or-later
"""QEMU's gdbstub (GDB's Remote Serial Protocol): run a guest up to an instruction."""

import socket

from .errors import LabError
from .qemu import Qemu

_PATIENCE = 60.0


class Gdb:
    """A connection to the gdbstub. The guest is stopped when it is made.

    The connection stays open: QEMU lets the guest run when it is closed.
    """

    def __init__(self, qemu: Qemu) -> None:
        path = qemu.folder / "gdb.sock"
        answer = qemu.monitor.human(f"gdbserver unix:{path},server=on,wait=off")
        if "Waiting" not in answer:
            raise LabError(f"QEMU started no gdbserver: {answer.strip()}")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_PATIENCE)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rb")
        qemu.keep(self._socket)

    def _send(self, command: str) -> None:
        data = command.encode()
        self._socket.sendall(b"$" + data + f"#{sum(data) % 256:02x}".encode())

    def _answer(self) -> str:
        """Return the next packet, and acknowledge it."""
        data = b""
        try:
            while (byte := self._file.read(1)) not in (b"$", b""):
                pass
            while (byte := self._file.read(1)) not in (b"#", b""):
                data += byte
            self._file.read(2)
        except TimeoutError:
            raise LabError("the guest did not get there in a minute") from None
        self._socket.sendall(b"+")
        return data.decode()

    def _ask(self, command: str) -> None:
        """Change something of the stopped guest."""
        self._send(command)
        # QEMU also tells that it stopped the guest when the connection was made.
        while (answer := self._answer()).startswith("T"):
            pass
        if answer != "OK":
            raise LabError(f"the gdbstub refused {command}: {answer}")

    def _run(self, command: str) -> None:
        """Let the guest run until it stops."""
        self._send(command)
        answer = self._answer()
        if not answer.startswith("T05"):
            raise LabError(f"the guest stopped for another reason: {answer}")

    def run_to(self, address: int, times: int = 1) -> None:
        """Let the guest run until a CPU is at an instruction, several times."""
        self._ask(f"Z0,{address:x},1")
        for number in range(times):
            if number:
                # Leave the instruction, where the breakpoint would stop it again.
                self.step(1)
            self._run("c")
        self._ask(f"z0,{address:x},1")

    def step(self, instructions: int) -> None:
        """Let the CPU that stopped run some instructions, and no other CPU."""
        for _ in range(instructions):
            self._run("s")
