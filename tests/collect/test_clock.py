# SPDX-License-Identifier: LGPL-2.1-or-later
"""The time of each step of an audit, and what it reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memcg_inspect.collect import clock
from memcg_inspect.collect.clock import Clock
from memcg_inspect.report import Reads


def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may be taken in several parts. One that fails took its time, too."""
    now, told = 100.0, list[tuple[str, float]]()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    memory = SimpleNamespace(reads=10, bytes_read=1000)
    progress = SimpleNamespace(report=lambda step, share: told.append((step, share)))
    image: Any = SimpleNamespace(memory=memory, progress=progress)
    found = Clock(image)
    for step, seconds, size in (("pages", 2.0, 64), ("tasks", 1.0, 0), ("pages", 4.0, 128)):
        with found.measure(step):
            now += seconds
            memory.reads += size > 0
            memory.bytes_read += size
        now += 50
        memory.reads += 7
        memory.bytes_read += 7
    assert told == [("pages", 0.0), ("tasks", 0.0), ("pages", 0.0)]
    assert found.seconds == {"pages": 6.0, "tasks": 1.0}
    assert found.reads == {"pages": Reads(2, 192), "tasks": Reads(0, 0)}
    with pytest.raises(ValueError, match="why"), found.measure("tasks"):
        now += 8
        memory.reads += 1
        raise ValueError("why")
    assert found.seconds["tasks"] == 9.0
    assert found.reads["tasks"] == Reads(1, 0)
