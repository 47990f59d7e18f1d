# SPDX-License-Identifier: LGPL-2.1-or-later
"""What a process of a pool does, and what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from memcg_inspect.collect import elsewhere
from memcg_inspect.collect.elsewhere import _collected, map_elsewhere
from memcg_inspect.linux.mm.mmzone import PageRange


class Process:
    """
    A process that opens images.

    :ivar opened: what was opened: program and context
    """

    def __init__(self) -> None:
        self.opened: list[tuple[Any, Any]] = []

    def image(self, prog: Any) -> Any:
        return SimpleNamespace(prog=prog, memory=SimpleNamespace(reads=100, bytes_read=1000))

    def collector(self, image: Any, context: Any) -> Any:
        self.opened.append((image.prog, context))

        def collect(part: PageRange) -> Any:
            image.memory.reads += 2
            image.memory.bytes_read += part.end - part.start
            return image.prog, part

        return collect


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    found = Process()
    monkeypatch.setattr(elsewhere, "Image", found.image)
    monkeypatch.setattr(elsewhere, "RangeCollector", found.collector)
    monkeypatch.setattr(elsewhere, "_opened", elsewhere._Opened())
    return found


def test_a_process_opens_the_image_once_for_each_walk(process: Process) -> None:
    """It tells what each range took to read."""
    progs: Iterator[Any] = iter(["one", "two"])

    def read(walk: str, start: int, end: int) -> Any:
        context: Any = f"context of {walk}"
        return _collected(lambda: next(progs), walk, context, PageRange(start, end))

    assert read("a", 0, 8) == (("one", PageRange(0, 8)), 2, 8)
    assert read("a", 8, 24) == (("one", PageRange(8, 24)), 2, 16)
    assert read("b", 0, 8) == (("two", PageRange(0, 8)), 2, 8)
    assert process.opened == [("one", "context of a"), ("two", "context of b")]


def test_all_ranges_of_a_walk_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walk has a name of its own."""
    asked: list[tuple[Any, ...]] = []
    inside: list[bool] = []

    @contextmanager
    def errors() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def submit(*args: Any) -> Any:
        assert inside
        asked.append(args)
        return len(asked)

    def gathered(image: Any, collector: Any, running: Any, wait: Any) -> Iterator[Any]:
        assert (image, collector, wait) == ("image", "collector", "wait")
        return iter(running)

    pool: Any = SimpleNamespace(
        errors=errors,
        share=lambda context: f"shared {context}",
        executor=SimpleNamespace(submit=submit),
        open="open",
        wait="wait",
    )
    monkeypatch.setattr(elsewhere, "gathered", gathered)
    run: Any = map_elsewhere("image", pool, "context")  # type: ignore[arg-type]
    parts = [PageRange(0, 8), PageRange(8, 16)]
    assert list(run("collector", parts)) == [(parts[0], 1), (parts[1], 2)]
    assert not inside
    assert [(a[0], a[1], *a[3:]) for a in asked] == [
        (_collected, "open", "shared context", part) for part in parts
    ]
    walks = {args[2] for args in asked}
    assert len(walks) == 1
    list(run("collector", parts))
    assert len({args[2] for args in asked} - walks) == 1
    assert all(len(bytes.fromhex(walk)) == 16 for walk in walks)
