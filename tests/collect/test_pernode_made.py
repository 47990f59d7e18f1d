# SPDX-License-Identifier: LGPL-2.1-or-later
"""How a percpu allocation is split by node, and how the two rules differ. All is made here."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from memcg_inspect.checks.ledger import Amount, Entry
from memcg_inspect.collect import pernode as module
from memcg_inspect.collect.inventory_part import BarePage, Head, InventoryPart
from memcg_inspect.collect.page_owners import Share
from memcg_inspect.collect.pernode import PerNode, per_node_of
from memcg_inspect.collect.slab_owners import SlabOwners
from memcg_inspect.linux.mm.mmzone import PageRange
from memcg_inspect.model import Coverage, Misplaced, Objcg
from memcg_inspect.model_pages import NEVER, NOBODY, UNUSED, Place

MEMCG, ELEMENT = 0x10, 0x70
#: The obj_cgroups of a memcg, by node.
ON = (0x1000, 0x1001, 0x1002)
OBJCGS = {
    address: Objcg(address, MEMCG, nid, False, 0, memcg_refs=1, siblings=ON)
    for nid, address in enumerate(ON)
}


def split(
    monkeypatch: pytest.MonkeyPatch,
    data: Mapping[int, int],
    metadata: Mapping[int, int],
    posted: Mapping[int, int],
) -> tuple[dict[Entry, Amount], PerNode]:
    """Split an allocation that names the obj_cgroup of node 0."""
    reader: Any = SimpleNamespace(
        data_nodes=lambda area: Counter(data), metadata_nodes=lambda area: Counter(metadata)
    )
    area: Any = SimpleNamespace(objcg=ON[0], element=ELEMENT)
    monkeypatch.setattr(module, "posted_percpu_nodes", lambda *_: posted)
    splitter = PerNode(OBJCGS, True)
    return dict(splitter.percpu(reader, area)), splitter


def entry(nid: int, detail: str) -> Entry:
    return Entry(ON[nid], "percpu", detail, nid)


def test_parts_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds one reference to each obj_cgroup that pays for a part."""
    found, splitter = split(monkeypatch, {0: 64, 1: 32}, {1: 8, 2: 4}, {0: 64, 1: 32})
    assert found == {
        entry(0, "data"): Amount(64, 1),
        entry(1, "data"): Amount(32, 1),
        entry(1, "metadata"): Amount(8, 0),
        entry(2, "metadata"): Amount(4, 1),
    }
    charges = splitter.charges()
    assert charges.posted == {"percpu": {}, "zswap": {}}
    assert (charges.straddling, charges.misplaced) == ([], [])


def test_data_that_the_posted_rule_books_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found, splitter = split(monkeypatch, {0: 64, 1: 32, 2: 8}, {}, {0: 104})
    assert found == {
        entry(nid, "data"): Amount(size, 1) for nid, size in ((0, 64), (1, 32), (2, 8))
    }
    charges = splitter.charges()
    assert charges.posted["percpu"] == {(ON[0], 0): 40, (ON[1], 1): -32, (ON[2], 2): -8}
    assert charges.posted["zswap"] == {}
    assert sorted(charges.straddling, key=lambda found: found.backing_nid) == [
        Misplaced("percpu", ELEMENT, ON[0], 0, nid, size) for nid, size in ((1, 32), (2, 8))
    ]
    assert charges.misplaced == []


@pytest.mark.parametrize(
    ("by_node", "missed", "payer"), [(False, 0, None), (True, 0, ON[0]), (True, 1, 0)]
)
def test_kernels_that_account_by_node(
    monkeypatch: pytest.MonkeyPatch, by_node: bool, missed: int, payer: int | None
) -> None:
    """If not all obj_cgroups were read, that of a node may be one that was not."""
    coverage = Coverage()
    for _ in range(missed):
        coverage.miss("objcg", 0x10, "not in the image")
    monkeypatch.setattr(module, "accounts_by_node", lambda _: by_node)
    found = per_node_of(None, OBJCGS, coverage)  # type: ignore[arg-type]
    assert (None if found is None else found.payer(ON[0], 7)) == payer


def test_shares_of_pages() -> None:
    """Nobody pays for the rest of what is used, and could have if the kind is one to pay for."""
    part = InventoryPart(PageRange(0, 8), 4096)
    slab, table = Place(0, 1, "slab"), Place(0, 1, "page_ext")
    part.count_shared(slab, 2, Share(5000, ((0xA0, 3000), (0xB0, 500))))
    part.count_shared(table, 1, Share(100, ()), 2)
    part.count(slab, 3, 0xA0)
    assert part.pages == {slab: 5, table: 2}
    assert part.bytes == {
        (slab, 0xA0): 3000 + 3 * 4096,
        (slab, 0xB0): 500,
        (slab, NOBODY): 1500,
        (slab, UNUSED): 2 * 4096 - 5000,
        (table, NEVER): 200,
        (table, UNUSED): 2 * (4096 - 100),
    }


def test_ranges_one_after_the_other() -> None:
    place = Place(0, 1, "unknown", 0)
    head = Head(place, NEVER)
    parts = [
        InventoryPart(
            PageRange(start, end),
            4096,
            last=head,
            conflicts=[(start, "slab", "stack")],
            unmarked={(place, NEVER): array("Q", [start])},
            bare={start: BarePage(0, 1, start)},
            heads={start + 1: head},
            in_slabs=SlabOwners({start}),
            unnamed={start: "why"},
        )
        for start, end in ((0, 8), (8, 16), (20, 24))
    ]
    for number, part in enumerate(parts, 1):
        part.count(place, number, NEVER)
        part.holes[0, 1] = number
        part.coverage["pages"].read = number
    whole = parts[0]
    for part in parts[1:]:
        whole.merge(part)
    assert (whole.part, whole.last) == (PageRange(0, 24), head)
    assert (whole.pages, whole.bytes) == ({place: 6}, {(place, NEVER): 6 * 4096})
    assert (whole.holes, whole.coverage["pages"].read) == ({(0, 1): 6}, 6)
    assert [pfn for pfn, _, _ in whole.conflicts] == [0, 8, 20]
    assert whole.unmarked == {(place, NEVER): array("Q", [0, 8, 20])}
    assert set(whole.bare) == set(whole.unnamed) == whole.in_slabs.socks == {0, 8, 20}
    # The last page of a range may begin a block, if the next page follows it and is bare.
    assert set(whole.heads) == {1, 7, 9, 21}
