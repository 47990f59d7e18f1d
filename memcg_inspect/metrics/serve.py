# SPDX-License-Identifier: LGPL-2.1-or-later
"""A server of metrics: what it serves is made elsewhere, so a scrape never waits for an audit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, SHUT_RDWR
from typing import Any
from urllib.parse import urlsplit

from memcg_inspect.escape import printable
from memcg_inspect.metrics.exposition import OPENMETRICS, PROMETHEUS
from memcg_inspect.model import MemcgInspectError

__all__ = ("Served", "served")

#: Seconds that a client may take for its request.
_TIMEOUT = 10
#: The most clients at a time.
_MOST_CLIENTS = 16
_HTML = "text/html; charset=utf-8"
_INDEX = '<!DOCTYPE html><title>memcg-inspect</title><a href="/metrics">metrics</a>\n'


class Served:
    """
    What is served now.

    :ivar texts: the metrics by content type; empty until there are any
    :ivar why_not: why there are none
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.why_not = "the first audit is not done yet"


@contextmanager
def served(address: str, port: int) -> Iterator[tuple[Served, int]]:
    """
    Serve metrics in threads for the time of a ``with`` block.

    :param port: 0 for any that is free
    :return: what to serve, and the port
    :raises MemcgInspectError: if the address cannot be used
    """
    content = Served()

    class Handler(_Handler):
        shown = content

    class Server(_Server):
        address_family = AF_INET6 if ":" in address else AF_INET

    try:
        server = Server((address, port), Handler)
    except (OSError, OverflowError, TypeError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise MemcgInspectError(f"cannot listen on {address} port {port}: {why}") from None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield content, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """A server for few clients, each of which takes little time."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._room = threading.BoundedSemaphore(_MOST_CLIENTS)
        bound = str(self.server_address[0])
        self.is_local = bound == "localhost" or _is_loopback(bound)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a client, unless there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client. One that sends a byte now and then does not hold the thread."""
        end = threading.Timer(_TIMEOUT, self._cut, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def _cut(self, request: Any) -> None:
        with suppress(OSError):
            request.shutdown(SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: what clients do is no error of this program."""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    shown: Served
    server: _Server
    timeout = _TIMEOUT
    server_version = "memcg-inspect"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with a page."""
        self._answer(True)

    def do_HEAD(self) -> None:
        """Answer without a page."""
        self._answer(False)

    def _answer(self, has_body: bool) -> None:
        try:
            path = urlsplit(self.path).path  # a proxy may send all of the URL
        except ValueError:
            path = ""
        if not self._is_meant():
            why = "this server is asked by its address, or as localhost\n"
            self._send(HTTPStatus.FORBIDDEN, PROMETHEUS, why, has_body)
            return
        if path == "/":
            self._send(HTTPStatus.OK, _HTML, _INDEX, has_body)
            return
        if path != "/metrics":
            self._send(HTTPStatus.NOT_FOUND, PROMETHEUS, "there is /metrics only\n", has_body)
            return
        accepts_open = "application/openmetrics-text" in self.headers.get("Accept", "")
        wanted = OPENMETRICS if accepts_open else PROMETHEUS
        text = self.shown.texts.get(wanted)
        if text is None:
            why = f"{printable(self.shown.why_not)}\n"
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, PROMETHEUS, why, has_body)
            return
        self._send(HTTPStatus.OK, wanted, text, has_body)

    def _is_meant(self) -> bool:
        """
        Return whether the client knows whom it asks.

        A page of another site that has its name resolve to a loopback address does not.
        """
        if not self.server.is_local:
            return True
        try:
            host = urlsplit(f"//{self.headers.get('Host', 'localhost')}").hostname or ""
        except ValueError:
            return False
        return host == "localhost" or _is_loopback(host)

    def _send(self, status: HTTPStatus, content_type: str, text: str, has_body: bool) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line for each scrape would hide the others."""
