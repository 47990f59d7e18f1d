# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Stopping a QEMU guest
---------------------

drgn reads the memory of a guest over a QMP connection. QEMU serves one connection of a monitor at a
time; others wait for its greeting until that one is closed, as drgn would, for ever. So this module
opens the connection and waits for the greeting for a limited time, and drgn gets a duplicate of the
file descriptor. The guest is stopped and resumed over the same connection while drgn is not using
it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memcg_inspect.model import ImageError

__all__ = ("GREETING_TIMEOUT", "Monitor")

#: Seconds to wait for the greeting of QEMU.
GREETING_TIMEOUT = 10.0
#: Seconds between two attempts to connect, if too many clients are waiting.
_PAUSE = 0.05
#: Seconds to wait for an answer. ``stop`` waits until devices have finished their requests.
_TIMEOUT = 30.0


class Monitor:
    """
    A QMP connection.

    :param address: path of a Unix domain socket, or ``host:port``
    :param timeout: seconds to wait for the greeting of QEMU
    :raises ImageError: if the connection cannot be opened, or there is no greeting
    """

    def __init__(self, address: str, timeout: float = GREETING_TIMEOUT) -> None:
        self._address = address
        end = time.monotonic() + timeout
        try:
            self._socket = _connect(address, end)
            # The greeting stays in the socket: drgn reads it.
            ready, _, _ = select.select([self._socket], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._socket.close()
                raise TimeoutError
        except TimeoutError:
            raise ImageError(
                f"{address}: no greeting of QEMU within {timeout:g} s: QEMU serves one client of a "
                "monitor at a time, and another one, such as libvirt, may be connected. Give the "
                "guest a second monitor: -qmp unix:PATH,server=on,wait=off on the command line of "
                "QEMU (for libvirt, in <qemu:commandline> of the domain)"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ImageError(f"{address} cannot be opened: {reason}") from None
        self._buffer = b""

    def descriptor(self) -> int:
        """Return a duplicate of the file descriptor; drgn closes it."""
        return os.dup(self._socket.fileno())

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """
        Stop the guest while the block runs.

        drgn must have opened the connection before: it negotiates the capabilities of QMP. A guest
        that is stopped already stays stopped.

        :raises ImageError: if QEMU refuses, or does not answer
        """
        was_running = self._execute("query-status").get("running", False)
        if not was_running:
            yield
            return
        try:
            self._execute("stop")
            yield
        finally:
            self._execute("cont")

    def _execute(self, command: str) -> dict[str, Any]:
        self._socket.settimeout(_TIMEOUT)
        try:
            self._socket.sendall(json.dumps({"execute": command}).encode() + b"\n")
            while True:
                message = json.loads(self._line())
                if "error" in message:
                    raise ImageError(f"{self._address}: QEMU refused {command}: {message['error']}")
                if "return" in message:
                    value: dict[str, Any] = message["return"]
                    return value
        except (OSError, ValueError) as error:
            raise ImageError(f"{self._address}: no answer to {command}: {error}") from None
        finally:
            self._socket.settimeout(None)

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _connect(address: str, end: float) -> socket.socket:
    """:param end: when to give up, as of ``time.monotonic()``"""
    host, colon, port = address.rpartition(":")
    if colon and not address.startswith(("/", ".")) and port.isdigit():
        left = max(_PAUSE, end - time.monotonic())
        found = socket.create_connection((host or "localhost", int(port)), left)
        found.settimeout(None)
        return found
    while True:
        unix = socket.socket(socket.AF_UNIX)
        # connect() would block while as many clients wait as QEMU's listen() allows.
        unix.setblocking(False)
        try:
            unix.connect(address)
        except BlockingIOError:
            unix.close()
            if time.monotonic() > end:
                raise TimeoutError from None
            time.sleep(_PAUSE)
        except OSError:
            unix.close()
            raise
        else:
            unix.setblocking(True)
            return unix
