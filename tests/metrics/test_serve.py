# SPDX-License-Identifier: LGPL-2.1-or-later
"""The server of metrics: clients that are slow, many, rude, or sent by a web page."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from memcg_inspect.metrics import serve
from memcg_inspect.metrics.exposition import PROMETHEUS
from memcg_inspect.metrics.serve import Served, served
from memcg_inspect.model import MemcgInspectError


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Served, tuple[str, int]]]:
    with served(request.param, 0) as (content, port):
        content.texts = {PROMETHEUS: "a 1\n"}
        yield content, (request.param, port)


def ask(address: tuple[str, int], text: str) -> str:
    """Send a request; return the answer."""
    with socket.create_connection(address, 10) as client:
        client.sendall(text.encode())
        return b"".join(iter(lambda: client.recv(65536), b"")).decode()


def test_answers(server: tuple[Served, tuple[str, int]]) -> None:
    content, address = server
    assert ask(address, "GET /metrics HTTP/1.0\r\n\r\n").endswith("\r\n\r\na 1\n")
    assert ask(address, "GET http://x/metrics?a=b HTTP/1.0\r\n\r\n").endswith("a 1\n")
    head = ask(address, "HEAD /metrics HTTP/1.0\r\n\r\n")
    assert "Content-Length: 4" in head
    assert head.endswith("\r\n\r\n")
    assert " 404 " in ask(address, "GET /etc/passwd HTTP/1.0\r\n\r\n")
    assert " 404 " in ask(address, "GET http://[/metrics HTTP/1.0\r\n\r\n")
    assert " 501 " in ask(address, "POST /metrics HTTP/1.0\r\n\r\n")
    content.texts, content.why_not = {}, "no\x1b[31m memory"
    answer = ask(address, "GET /metrics HTTP/1.0\r\n\r\n")
    assert " 503 " in answer
    assert answer.endswith("no\\x1b[31m memory\n")


@pytest.mark.parametrize(
    ("host", "is_meant"),
    [
        ("localhost", True),
        ("localhost:9917", True),
        ("127.0.0.1:9917", True),
        ("[::1]:9917", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example:80", False),
        ("192.0.2.1", False),
        ("[", False),
        ("", False),
    ],
)
def test_a_web_page_cannot_ask(
    server: tuple[Served, tuple[str, int]], host: str, is_meant: bool
) -> None:
    """Its browser sends the name of the page's server, whatever address that has."""
    lines = ("GET /metrics HTTP/1.0", f"Host: {host}", "", "")
    answer = ask(server[1], "\r\n".join(lines))
    assert (" 200 " in answer) == is_meant
    assert (" 403 " in answer) != is_meant


def test_slow_clients_do_not_keep_others_out(
    server: tuple[Served, tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "_TIMEOUT", 1)
    with ExitStack() as clients:
        connect = socket.create_connection
        slow = [clients.enter_context(connect(server[1], 10)) for _ in range(40)]
        end = time.monotonic() + 30
        while not is_served(server[1]):
            assert time.monotonic() < end
            for client in slow:
                try:
                    client.sendall(b"x")
                except OSError:
                    continue  # it was cut off
            time.sleep(0.2)
    # Clients that are gone are no news.
    with socket.create_connection(server[1]) as rude:
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        rude.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    time.sleep(0.2)
    assert capfd.readouterr() == ("", "")


def is_served(address: tuple[str, int]) -> bool:
    try:
        return " 200 " in ask(address, "GET /metrics HTTP/1.0\r\n\r\n")
    except OSError:
        return False


@pytest.mark.parametrize("address", ["192.0.2.1", "\udcff", "a" * 70])
def test_addresses_that_cannot_be_used(address: str) -> None:
    with pytest.raises(MemcgInspectError, match="cannot listen on"), served(address, 0):
        pass
