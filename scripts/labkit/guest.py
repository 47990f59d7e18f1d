# SPDX-License-Identifier: LGPL-2.1-or-later
"""Talk to the guest's init (fixtures/guest/init) through its ports ctl, out and err.

The host sends a line on ctl: a token, and a shell script in base64. Init runs the script with
its output on out and err. When the script ends, init writes the token to both, and its status
to ctl.
"""

import base64
import re
import secrets
import selectors
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from .errors import GuestError, StaleCodeError
from .progress import doing
from .qemu import Qemu

PORTS = ("ctl", "out", "err")
# Lockups are the fault of a slow emulator.
_TROUBLE = re.compile(
    r"Kernel panic - not syncing|\bOops\b|BUG: (?!soft lockup|workqueue lockup)"
    r"|general protection fault"
)
_STALE_CODE = re.compile(r"\bint3: 0000 \[#1\]")


@dataclass
class Answer:
    """Status and output of a script in the guest."""

    status: int
    out: bytes
    err: bytes


def console_tail(text: str, lines: int = 30) -> str:
    """Return the end of the console, or what follows the first oops or panic."""
    clean = text.replace("\r", "").splitlines()
    for number, line in enumerate(clean):
        if _TROUBLE.search(line):
            clean = clean[max(0, number - 5) : number + 60]
            break
    else:
        clean = clean[-lines:]
    return "\n".join(f"  {line}" for line in clean) or "  (nothing was written to the console)"


class Guest:
    """A guest whose init has started."""

    def __init__(self, qemu: Qemu, *, timeout: float = 120.0) -> None:
        self.qemu = qemu
        self._ports: dict[str, socket.socket] = qemu.ports
        self._control = b""
        self._crashing = False
        for port in self._ports.values():
            port.setblocking(False)
        self._wait_line("up", timeout, "boot")

    def fail(self, what: str) -> GuestError:
        """Return an error with the end of the console."""
        console = self.qemu.console()
        error = StaleCodeError if _STALE_CODE.search(console) else GuestError
        return error(f"{what}; the guest's console:\n{console_tail(console)}")

    def _no_answer(self, timeout: float | None, what: str) -> GuestError:
        # The places of its CPUs tell an idle guest from one that loops.
        counters = self.qemu.arch.counters(self.qemu.monitor.registers())
        places = ", ".join(f"{pc:x}" for pc in counters)
        text = f"no answer from the guest in {timeout:.0f} s during: {what} (CPUs at {places})"
        return self.fail(text)

    def check(self, what: str) -> None:
        """Raise GuestError if the guest has ended or its kernel has failed."""
        if self.qemu.process.poll() is not None:
            raise self.fail(f"the guest ended during: {what}")
        if not self._crashing and _TROUBLE.search(self.qemu.console()):
            # The rest of the report takes a moment to reach the console.
            time.sleep(1)
            raise self.fail(f"the guest's kernel failed during: {what}")

    def _wait_line(self, word: str, timeout: float, what: str) -> str:
        lines: list[str] = []

        def take(name: str, data: bytes) -> bool:
            if name == "ctl":
                self._control += data
            while b"\n" in self._control:
                line, self._control = self._control.split(b"\n", 1)
                if line.decode(errors="replace").startswith(word):
                    lines.append(line.decode(errors="replace"))
            return bool(lines)

        self.pump(take, timeout, what)
        return lines[0]

    def pump(self, take: Callable[[str, bytes], bool], timeout: float | None, what: str) -> None:
        """Pass on what comes through the ports, as (port, bytes), until `take` returns true."""
        end = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for name, port in self._ports.items():
                selector.register(port, selectors.EVENT_READ, name)
            while True:
                ready = selector.select(1.0)
                for key, _ in ready:
                    try:
                        data = self._ports[key.data].recv(1 << 20)
                    except (BlockingIOError, ConnectionResetError):
                        data = b""
                    if not data:
                        self.check(what)
                        time.sleep(0.05)
                    elif take(key.data, data):
                        return
                if not ready:
                    self.check(what)
                if end is not None and time.monotonic() > end:
                    raise self._no_answer(timeout, what)

    def sh(
        self,
        script: str,
        *,
        what: str,
        timeout: float | None = 120.0,
        sink: Callable[[str, bytes], None] | None = None,
    ) -> Answer:
        """Run a shell script as a task of the root cgroup.

        With `sink`, output goes there as it comes, as (port, bytes).
        """
        token = secrets.token_hex(8)
        pending = {"out": b"", "err": b""}
        kept = {"out": bytearray(), "err": bytearray()}
        ended: set[str] = set()
        status: list[int] = []
        mark = token.encode()

        def emit(name: str, data: bytes) -> None:
            if data:
                (kept[name].extend if sink is None else lambda d: sink(name, d))(data)

        def take(name: str, data: bytes) -> bool:
            if name == "ctl":
                self._control += data
                while b"\n" in self._control:
                    line, self._control = self._control.split(b"\n", 1)
                    words = line.decode(errors="replace").split()
                    if words[:2] == ["done", token]:
                        status.append(int(words[2]))
            elif name not in ended:
                whole = pending[name] + data
                at = whole.find(mark)
                if at >= 0:
                    emit(name, whole[:at])
                    ended.add(name)
                else:
                    # The token may come in two pieces.
                    cut = max(0, len(whole) - len(mark) + 1)
                    emit(name, whole[:cut])
                    pending[name] = whole[cut:]
            return bool(status) and len(ended) == 2

        self.send(f"{token} {base64.b64encode(script.encode()).decode()}\n".encode())
        self.pump(take, timeout, what)
        return Answer(status[0], bytes(kept["out"]), bytes(kept["err"]))

    def send(self, line: bytes) -> None:
        """Write to the guest's ctl port."""
        port = self._ports["ctl"]
        port.setblocking(True)
        port.sendall(line)
        port.setblocking(False)

    def must(self, script: str, *, what: str, timeout: float | None = 120.0) -> bytes:
        """Run a script like sh(), and return its output.

        :raises GuestError: if it fails
        """
        answer = self.sh(script, what=what, timeout=timeout)
        if answer.status:
            said = (answer.err + answer.out).decode(errors="replace").strip()
            raise self.fail(f"{what} failed in the guest with status {answer.status}: {said}")
        return answer.out

    def crash(self) -> None:
        """Make the guest's kernel crash. Call receive() after this."""
        self._crashing = True
        self._begin("echo c >/proc/sysrq-trigger")

    def _begin(self, script: str) -> None:
        """Begin a script after which the guest does not answer."""
        self.send(f"last {base64.b64encode(script.encode()).decode()}\n".encode())

    def end_by(self, script: str, *, timeout: float, what: str) -> None:
        """Run a script that ends the guest, by a crash perhaps, and wait until QEMU has ended."""
        self._crashing = True
        with doing(what):
            self._begin(script)
            try:
                self.qemu.process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise self._no_answer(timeout, what) from None

    def receive(self, feed: Callable[[bytes], None], *, timeout: float, what: str) -> int:
        """Receive what the crash kernel sends on out, and return the status of its command."""
        token = secrets.token_hex(8)
        pending = b""
        ended = False
        status: list[int] = []

        def take(name: str, data: bytes) -> bool:
            nonlocal pending, ended
            if name == "ctl":
                self._control += data
                while b"\n" in self._control:
                    line, self._control = self._control.split(b"\n", 1)
                    words = line.decode(errors="replace").split()
                    if words[:1] == ["crashed"]:
                        self.send(f"{token}\n".encode())
                    elif words[:1] == ["saved"]:
                        status.append(int(words[1]))
            elif name == "out":
                whole = pending + data
                at = whole.find(token.encode())
                ended = ended or at >= 0
                cut = at if at >= 0 else max(0, len(whole) - len(token) + 1)
                feed(whole[:cut])
                pending = b"" if at >= 0 else whole[cut:]
            return bool(status) and ended

        self.pump(take, timeout, what)
        return status[0]
