# SPDX-License-Identifier: LGPL-2.1-or-later
"""Counters of memcgs that a test makes, and words of memory that counters are in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import counter_words, counters
from memcg_inspect.collect.counter_words import find_words
from memcg_inspect.collect.counters import (
    read_lruvecs,
    read_page_counters,
    read_swap_entries,
    read_usage,
)
from memcg_inspect.model import Coverage
from memcg_inspect.model_counters import CounterWord
from memcg_inspect.report import Finding

ONE, LOST, TWO = 0x1000, 0x2000, 0x3000
IMAGE: Any = SimpleNamespace(pointer=lambda name, address: (name, address))
MEMCG = "struct mem_cgroup *"


def missed(coverage: Coverage) -> list[tuple[str, int, str]]:
    return [(m.what, m.address, m.reason.partition(": 0x")[0]) for m in coverage.examples]


def test_page_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memcg that is not in the image is left out, and others are read all the same."""

    def usage(memcg: tuple[str, int], name: str = "memory") -> int:
        assert memcg[0] == MEMCG
        if memcg[1] == LOST and name != "kmem":
            raise FaultError("not there", LOST + 8)
        return memcg[1] + len(name)

    monkeypatch.setattr(counters, "memory_usage", usage)
    monkeypatch.setattr(counters, "page_counter_usage", usage)
    monkeypatch.setattr(counters, "page_counters", lambda _: ("kmem", "memory", "swap"))
    coverage = Coverage()
    assert read_usage(IMAGE, [ONE, LOST, TWO], coverage) == {ONE: ONE + 6, TWO: TWO + 6}
    assert missed(coverage) == [("page counter", LOST + 8, "not there")]
    coverage = Coverage()
    assert read_page_counters(IMAGE, [ONE, LOST, TWO], coverage) == {
        (ONE, "kmem"): ONE + 4,
        (ONE, "swap"): ONE + 4,
        (LOST, "kmem"): LOST + 4,
        (TWO, "kmem"): TWO + 4,
        (TWO, "swap"): TWO + 4,
    }
    assert missed(coverage) == [("page counter", LOST + 8, "not there")]


class Lost:
    """An ID that is not in the image."""

    @property
    def id(self) -> Any:
        raise FaultError("not there", LOST + 8)


def test_swap_entries() -> None:
    """The ID of a removed memcg is 0 when no entry has it."""
    memcgs: dict[int, Any] = {
        at: SimpleNamespace(id=SimpleNamespace(id=number))
        for at, number in ((ONE, 5), (TWO, 0), (0x4000, 6), (0x5000, 1))
    }
    memcgs[LOST] = SimpleNamespace(id=Lost())
    image: Any = SimpleNamespace(pointer=lambda name, address: {MEMCG: memcgs}[name][address])
    coverage = Coverage()
    asked = [ONE, LOST, TWO, 0x4000, 0x5000]
    found = read_swap_entries(image, asked, {5: 7, 0: 9, 1: 3}, coverage)
    assert found == {ONE: 7, TWO: 0, 0x4000: 0, 0x5000: 3}
    assert missed(coverage) == [("ID of a memcg", LOST + 8, "not there")]


def nodeinfo(image: Any, memcg: tuple[str, int], on_fault: Any = None) -> Any:
    if memcg[1] == LOST:
        if on_fault is None:
            raise FaultError("not there", LOST + 8)
        on_fault(FaultError("not there", LOST + 8))
        return
    for nid in (0, 2):
        yield nid, f"node {nid} of {memcg[1]:#x}"


def test_nodes_of_memcgs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "nodeinfo", nodeinfo)
    coverage = Coverage()
    assert read_lruvecs(IMAGE, [ONE, LOST], coverage) == {
        (ONE, 0): "node 0 of 0x1000",
        (ONE, 2): "node 2 of 0x1000",
    }
    assert missed(coverage) == [("nodes of a memcg", LOST + 8, "not there")]


def wrong(memcg: int | None, nid: int | None, item: str = "ITEM") -> Finding:
    return Finding("slab", "counter-above-objects", memcg, None, nid, item, "bytes", 8, "", "proof")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make words, whose items tell where they are from."""

    def word(item: str) -> Any:
        return CounterWord(*[0] * len(CounterWord._fields))._replace(item=item)

    def memcg_words(of: tuple[str, int]) -> Any:
        if of[1] == LOST:
            raise FaultError("not there", LOST + 8)
        return [word("memcg")]

    reader = SimpleNamespace(
        memcg_words=memcg_words, lruvec_words=lambda pn: [word(f"lruvec of {pn}")]
    )

    def stat_reader(image: Any, items: Any) -> Any:
        assert list(items) == ["A", "B", "C"]
        return reader

    def node_words(kind: str) -> Any:
        return lambda image, nid: [word(f"{kind} {nid}")]

    for name, value in {
        "StatReader": stat_reader,
        "memcg_items": lambda _: ("A", "B"),
        "lruvec_items": lambda _: ("B", "C"),
        "LruReader": lambda image, coverage: SimpleNamespace(words=lambda pn: [word("lists")]),
        "page_counter_words": lambda image, of: [word("page counter")],
        "node_stat_words": node_words("node"),
        "zone_stat_words": node_words("zone"),
        "nodeinfo": nodeinfo,
    }.items():
        monkeypatch.setattr(counter_words, name, value)


def found(*findings: Finding) -> list[tuple[str, int | None, int | None]]:
    return [(w.item, w.memcg, w.nid) for w in find_words(IMAGE, findings)]


@pytest.mark.usefixtures("words")
def test_words_of_memcgs() -> None:
    """Those of its nodes only if they have findings."""
    of_memcg = [("memcg", ONE, 0), ("page counter", ONE, 0)]
    assert found(wrong(ONE, None)) == of_memcg
    nodes = [("lruvec of node 2 of 0x1000", ONE, 2), ("lists", ONE, 2)]
    assert found(wrong(ONE, 2)) == of_memcg + nodes
    assert found() == []


@pytest.mark.usefixtures("words")
def test_words_of_nodes() -> None:
    """Node 0 is one; no node, and -1, are none."""
    assert found(wrong(None, 0), wrong(None, None), wrong(None, -1)) == [
        ("node 0", 0, 0),
        ("zone 0", 0, 0),
    ]


@pytest.mark.usefixtures("words")
def test_memcgs_with_most_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same item on the same node counts once. A memcg may be missing."""
    monkeypatch.setattr(counter_words, "_MOST_MEMCGS", 2)
    findings = [wrong(ONE, None)] * 3 + [wrong(TWO, None, item) for item in ("X", "Y")]
    findings += [wrong(LOST, None, item) for item in ("X", "Y", "Z")]
    memcgs = {memcg for _, memcg, _ in found(*findings)}
    assert memcgs == {TWO}
    monkeypatch.setattr(counter_words, "_MOST_MEMCGS", 3)
    assert {memcg for _, memcg, _ in found(*findings)} == {ONE, TWO}
