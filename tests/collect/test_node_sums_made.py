# SPDX-License-Identifier: LGPL-2.1-or-later
"""Pages of areas and percpu allocations that are made here, added up by node."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.layouts import FRAMES

from memcg_inspect.checks.ledger import Amount, Entry, Ledger
from memcg_inspect.collect import node_uses
from memcg_inspect.collect import zswap as zswap_module
from memcg_inspect.collect.node_uses import NodeUses
from memcg_inspect.collect.percpu import add_percpu, percpu_usage
from memcg_inspect.collect.zswap import ZswapExamples, add_zswap
from memcg_inspect.linux.mm.vmalloc import VmArea
from memcg_inspect.linux.mm.zswap import ZswapEntry
from memcg_inspect.model import NUMA_NO_NODE, Coverage, PercpuUsage

IMAGE: Any = object()
OBJCG = 0xA0


def area(*pfns: int, user: Any = "", is_counted: bool = True) -> VmArea:
    return VmArea(0, [FRAMES.page(n) for n in pfns], bool(user), user, is_counted)


def piece(start: int, end: int, nids: Any) -> Any:
    """Return page frames, with their node, or the node of each."""
    page = FRAMES.page(start)
    return SimpleNamespace(
        page=page,
        data=bytes((end - start) * FRAMES.size),
        nids=nids,
        nid=lambda i: nids[i],
    )


AREAS = [
    area(3, 1, 8),
    area(2, is_counted=False),
    area(4, 5, user="task", is_counted=False),
    area(6, user="unknown", is_counted=False),
    area(7, user="cached", is_counted=False),
]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_uses, "mem_map", lambda _: FRAMES)
    monkeypatch.setattr(node_uses, "thread_size", lambda _: 4 * FRAMES.page_size)
    monkeypatch.setattr(node_uses, "block_users", lambda *_: {})


def test_areas() -> None:
    """Stacks that are cached are not counted. A piece has the pages of a range."""
    uses = NodeUses(IMAGE, AREAS, Coverage())
    assert +uses.of(piece(0, 16, 1)) == {
        ("vmalloc", 1): 3,
        ("stack", 1): 2,
        ("unknown stack", 1): 1,
    }
    assert +uses.of(piece(3, 8, 2)) == {
        ("vmalloc", 2): 1,
        ("stack", 2): 2,
        ("unknown stack", 2): 1,
    }
    assert +uses.of(piece(3, 6, [0, 1, 2])) == {("vmalloc", 0): 1, ("stack", 1): 1, ("stack", 2): 1}


def test_stacks_that_are_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a block is on the node of its first page."""
    blocks = {16: "task", 20: "unknown", 24: "cached", 28: "task"}
    users = {FRAMES.page(pfn): user for pfn, user in blocks.items()}
    monkeypatch.setattr(node_uses, "block_users", lambda *_: users)
    uses = NodeUses(IMAGE, AREAS[:1], Coverage())
    assert +uses.of(piece(0, 24, 1)) == {
        ("vmalloc", 1): 3,
        ("stack", 1): 4,
        ("unknown stack", 1): 4,
    }
    nids = [0] * 8 + [1] * 8 + [2] * 16
    assert +uses.of(piece(0, 32, nids)) == {
        ("vmalloc", 0): 2,
        ("vmalloc", 1): 1,
        ("stack", 2): 8,
        ("unknown stack", 2): 4,
    }


def percpu(data: dict[int, int], metadata: dict[int, int], missed: int = 0) -> Any:
    """Return a reader of two allocations, the second of which nobody pays for."""
    coverage = Coverage()
    for _ in range(missed):
        coverage.miss("percpu chunk", 0x10, "not in the image")
    areas = [SimpleNamespace(objcg=OBJCG), SimpleNamespace(objcg=0)]
    return SimpleNamespace(
        chunks=lambda: [areas],
        recorded=lambda chunk: chunk,
        data_nodes=lambda area: data,
        metadata_nodes=lambda area: metadata,
        coverage=coverage,
    )


def test_one_allocation_is_one_charge() -> None:
    ledger, seen = Ledger(), list[int]()
    on_area = lambda area: seen.append(area.objcg)  # noqa: E731
    add_percpu(ledger, percpu({0: 64, 1: 32}, {1: 8}), None, on_area)
    entry = Entry(OBJCG, "percpu", "data", 0)
    assert dict(ledger) == {
        entry: Amount(64, 1),
        entry._replace(nid=1): Amount(32, 0),
        entry._replace(nid=1, detail="metadata"): Amount(8, 0),
    }
    assert seen == [OBJCG, 0]
    assert not ledger.missing
    add_percpu(ledger, percpu({}, {}, 1), None)
    assert ledger.missing == {("percpu", None, None)}


def test_the_payer_of_a_part_on_no_known_node() -> None:
    """It depends on the node, if the kernel accounts by node."""
    parts = [(Entry(OBJCG, "percpu", "data", nid), Amount(64, 1)) for nid in (0, NUMA_NO_NODE)]
    splitter: Any = SimpleNamespace(percpu=lambda reader, area: parts)
    ledger = Ledger()
    add_percpu(ledger, percpu({}, {}), splitter)
    assert dict(ledger) == {parts[0][0]: Amount(64, 1)}
    assert ledger.missing == {("percpu", None, None)}
    ledger = Ledger()
    add_percpu(ledger, percpu({NUMA_NO_NODE: 64}, {}), None)
    assert dict(ledger) == {parts[1][0]: Amount(64, 1)}
    assert not ledger.missing


def test_percpu_memory_of_nodes() -> None:
    """Pages of a chunk may be on nodes that nobody is charged on, and the other way round."""
    reader: Any = SimpleNamespace(pages=Counter({2: 4, 0: 8}), allocated=Counter({0: 100}))
    ledger = Ledger()
    ledger.add(Entry(OBJCG, "percpu", "data", 0), 64, 1)
    ledger.add(Entry(OBJCG + 8, "percpu", "data", 0), 8, 1)
    ledger.add(Entry(OBJCG, "percpu", "metadata", 0), 16, 1)
    ledger.add(Entry(OBJCG, "percpu", "data", 1), 32, 1)
    ledger.add(Entry(OBJCG, "slab", "data", 0), 1, 1)
    assert percpu_usage(ledger, reader) == (
        PercpuUsage(0, 8, 100, 72),
        PercpuUsage(1, 0, 0, 32),
        PercpuUsage(2, 4, 0, 0),
    )


def test_zswap_entries_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is one charge. An entry without data that can be found is on no node."""
    monkeypatch.setattr(zswap_module, "mem_map", lambda _: FRAMES)
    entries = [ZswapEntry(1, 100, 0, OBJCG), ZswapEntry(2, 50, 0, OBJCG)]
    reader: Any = SimpleNamespace(
        image=IMAGE,
        coverage=Coverage(),
        entries=lambda: entries,
        nodes=lambda entry: {0: 70, 1: 30} if entry.address == 1 else {},
    )
    ledger, examples = Ledger(), ZswapExamples()
    added = add_zswap(ledger, reader, {}, None, True, examples)
    entry = Entry(OBJCG, "zswap", "compressed", 0)
    assert dict(ledger) == {
        entry: Amount(70, 1),
        entry._replace(nid=1): Amount(30, 0),
        entry._replace(nid=NUMA_NO_NODE): Amount(0, 1),
    }
    assert examples.found == {entry: [1], entry._replace(nid=1): [1]}
    assert (added.references, added.unlisted) == ({}, [])
