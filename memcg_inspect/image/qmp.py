# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Stopping a QEMU guest
---------------------

drgn reads the memory of a guest over a QMP connection. QEMU serves one connection at a time. So
this module opens the connection, and drgn gets a duplicate of the file descriptor. The guest is
stopped and resumed over the same connection while drgn is not using it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memcg_inspect.model import ImageError

__all__ = ("Monitor",)

#: Seconds to wait for an answer. ``stop`` waits until devices have finished their requests.
_TIMEOUT = 30.0


class Monitor:
    """
    A QMP connection.

    :param address: path of a Unix domain socket, or ``host:port``
    :raises ImageError: if the connection cannot be opened
    """

    def __init__(self, address: str) -> None:
        self._address = address
        try:
            self._socket = _connect(address)
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


def _connect(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    if colon and not address.startswith(("/", ".")) and port.isdigit():
        return socket.create_connection((host or "localhost", int(port)), _TIMEOUT)
    unix = socket.socket(socket.AF_UNIX)
    unix.connect(address)
    return unix
