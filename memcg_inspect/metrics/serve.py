# SPDX-License-Identifier: LGPL-2.1-or-later
"""A server of metrics: what it serves is made elsewhere, so a scrape never waits for an audit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

from memcg_inspect.metrics.exposition import OPENMETRICS, PROMETHEUS
from memcg_inspect.model import MemcgInspectError

__all__ = ("Served", "served")

#: Seconds that a client may take for its request.
_TIMEOUT = 10
_HTML = "text/html; charset=utf-8"
_INDEX = '<!DOCTYPE html><title>memcg-inspect</title><a href="/metrics">metrics</a>\n'


class Served:
    """
    What is served now.

    :ivar texts: the metrics by content type; empty until there are any
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}


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

    class Server(ThreadingHTTPServer):
        address_family = AF_INET6 if ":" in address else AF_INET
        daemon_threads = True

    try:
        server = Server((address, port), Handler)
    except (OSError, OverflowError) as error:
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


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    shown: Served
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
        path = self.path.partition("?")[0]
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
            why = "the first audit is not done yet\n"
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, PROMETHEUS, why, has_body)
            return
        self._send(HTTPStatus.OK, wanted, text, has_body)

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
