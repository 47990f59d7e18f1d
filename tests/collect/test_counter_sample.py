# SPDX-License-Identifier: LGPL-2.1-or-later
"""Samples of counters: what is read, and how much a memcg uses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.made_samples import APP, MEMCGS, ROOT, made_sample

from memcg_inspect.collect import counter_sample as module
from memcg_inspect.collect.counter_sample import CURRENT, item_names, take_sample
from memcg_inspect.linux.mm.memcontrol_stat import StatLine
from memcg_inspect.model import Coverage, ImageInfo

IMAGE: Any = object()
LINES = (
    StatLine("percpu", ("A", "B"), "bytes", 1, True),
    StatLine("pgfault", ("C",), "events", 1, False),
    StatLine("slab", ("B", "D"), "bytes", 1, True),
)
INFO = ImageInfo("7.3.4", "qemu", (0, 1), 4, 4096, "memcg")


def test_what_a_memcg_uses() -> None:
    """The page counter is not kept by node. A line may have several counters, and a unit."""
    sample = made_sample(1.0, 5000)
    assert sample.amount(APP, CURRENT) == 8192
    assert sample.amount(ROOT, CURRENT) is None
    assert sample.amount(APP, CURRENT, 1) is None
    assert sample.amount(APP, "slab") == sample.amount(APP, "slab", 1) == 5000
    assert sample.amount(APP, "kernel_stack") == 2048
    assert sample.amount(APP, "slab", 0) == 0
    assert sample.amount(0x9999, "slab") is None
    assert sample.amount(APP, "nothing") is None


def test_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that count events are not read."""
    items: list[Any] = []

    def counters(image: Any, reader: Any, memcgs: Any, coverage: Coverage) -> Any:
        assert memcgs is MEMCGS
        coverage.miss("counters of a memcg", 1, "not in the image")
        return SimpleNamespace(nids=(0, 1), reader=reader)

    def usage(image: Any, memcgs: Any, coverage: Coverage) -> Any:
        coverage.miss("page counter", 2, "not in the image")
        return {APP: 3}

    def memcgs(image: Any, coverage: Coverage) -> Any:
        coverage.miss("memcg", 3, "not in the image")
        coverage.read += 5
        return MEMCGS

    def reader(image: Any, wanted: Any) -> str:
        items.append(list(wanted))
        return "reader"

    for name, value in {
        "read_memcgs": memcgs,
        "stat_lines": lambda _: LINES,
        "StatReader": reader,
        "read_counters": counters,
        "read_usage": usage,
        "mem_map": lambda _: SimpleNamespace(page_size=4096),
        "image_info": lambda _: INFO,
        "time": SimpleNamespace(monotonic=lambda: 7.0, time=lambda: 8.0),
    }.items():
        monkeypatch.setattr(module, name, value)
    sample = take_sample(IMAGE)
    assert items == [["A", "B", "D"]]
    assert (sample.image, sample.seconds, sample.clock) == (INFO, 7.0, 8.0)
    assert sample.memcgs is MEMCGS
    assert sample.lines == {"percpu": LINES[0], "slab": LINES[2]}
    assert (sample.nodes, sample.unread) == ((0, 1), 3)
    assert sample._usage == {APP: 3 * 4096}
    counted: Any = sample._counters
    assert counted.reader == "reader"


def test_names_of_what_can_be_shown() -> None:
    """Kernel memory comes first, and what a kernel does not count is left out."""
    names = ("file", "vmalloc", "slab", "sock", "kernel", "anon", "percpu", "pagetables")
    lines = {name: StatLine(name, (), "bytes", 1, True) for name in names}
    sample = replace(made_sample(1.0, 100), lines=lines)
    assert item_names(sample) == (
        *("slab", "current", "kernel", "pagetables", "percpu", "sock", "vmalloc"),
        *("file", "anon"),
    )
