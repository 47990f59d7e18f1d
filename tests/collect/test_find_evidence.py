# SPDX-License-Identifier: LGPL-2.1-or-later
"""Evidence: every charge that a query asks for is found, and drgn finds the same at its address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from drgn import Object
from drgn.helpers.linux.mm import virt_to_page, virt_to_pfn
from drgn.helpers.linux.slab import slab_object_info
from support.guests import Lab
from support.reference import node_spans

from memcg_inspect.checks.evidence_query import EvidenceQuery
from memcg_inspect.checks.ledger import Amount, ChargeKind, Entry
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.collect.evidence import find_evidence
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.report import Evidence

pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def image(lab: Lab) -> Image:
    # With debug info, which drgn's helpers of slabs need.
    return image_of(lab.image("7.3", "4", "mixed").program(dwarf=True))


@pytest.fixture(scope="module")
def snapshot(image: Image) -> Snapshot:
    return collect(image)


def most(snapshot: Snapshot, kind: ChargeKind) -> tuple[Entry, Amount]:
    """Return the entry of a kind with most charges."""
    found = [(entry, amount) for entry, amount in snapshot.ledger if entry.kind == kind]
    return max(found, key=lambda pair: pair[1].charges)


def found_for(
    image: Image, snapshot: Snapshot, query: EvidenceQuery
) -> tuple[tuple[Evidence, ...], Mapping[tuple[str, int, int], int]]:
    """Return the charges that are listed, and the number of all by kind, bytes and payer."""
    candidates = find_evidence(image, snapshot, [query])[query]
    assert candidates.total == candidates.sizes.total()
    return candidates.listed, candidates.sizes


def node_of(image: Image, address: int) -> int:
    pfn = virt_to_pfn(Object(image.prog, "void *", address)).value_()
    return next(nid for start, end, nid in node_spans(image.prog) if start <= pfn < end)


def test_objects_of_slabs(image: Image, snapshot: Snapshot) -> None:
    entry, amount = most(snapshot, "slab")
    query = EvidenceQuery("slab", frozenset({entry.payer}), entry.detail, entry.nid)
    listed, sizes = found_for(image, snapshot, query)
    assert sum(sizes.values()) == amount.charges
    assert sum(size * number for (_, size, _), number in sizes.items()) == amount.bytes
    assert {(kind, payer) for kind, _, payer in sizes} == {("slab", entry.payer)}
    assert listed
    for evidence in listed:
        info = slab_object_info(Object(image.prog, "void *", evidence.address))
        assert info is not None
        assert info.address == evidence.address
        assert evidence.cache == info.slab_cache.name.string_().decode()
        assert evidence.bytes == info.slab_cache.size.value_() + 8
        assert evidence.page == info.slab.value_()
        assert evidence.nid == node_of(image, evidence.address) == entry.nid
        assert (evidence.kind, evidence.objcg) == ("slab", entry.payer)
        assert evidence.memcg == snapshot.payer(entry.payer)
        assert evidence.note is not None
        element = int(evidence.note.removeprefix("objcg at "), 0)
        assert image.prog.read_word(element) & ~7 == entry.payer


def test_pages_and_user_pages(image: Image, snapshot: Snapshot) -> None:
    """``memcg_data`` names who pays; pages of the kernel have a flag in it."""
    kinds: tuple[ChargeKind, ...] = ("kmem", "lru")
    for kind in kinds:
        entry, _ = most(snapshot, kind)
        query = EvidenceQuery(kind, frozenset({entry.payer}), nid=entry.nid)
        listed, sizes = found_for(image, snapshot, query)
        charges = [
            amount
            for other, amount in snapshot.ledger
            if (other.payer, other.kind, other.nid) == (entry.payer, kind, entry.nid)
        ]
        assert sum(sizes.values()) == sum(amount.charges for amount in charges)
        total = sum(size * number for (_, size, _), number in sizes.items())
        # Of a block that is not compound, only the first page is known here.
        assert total == sum(amount.bytes for amount in charges) or kind == "kmem"
        assert listed
        for evidence in listed:
            page = virt_to_page(image.prog, evidence.address)
            assert evidence.page == page.value_()
            assert page.memcg_data.value_() & ~7 == evidence.objcg == entry.payer
            assert bool(page.memcg_data.value_() & 2) == (kind == "kmem")
            assert evidence.nid == node_of(image, evidence.address) == entry.nid
            assert evidence.memcg == snapshot.payer(entry.payer)
            assert (kind, evidence.bytes or 0, entry.payer) in sizes
            assert evidence.kind == kind


def test_percpu_allocations(image: Image, snapshot: Snapshot) -> None:
    entry, _ = most(snapshot, "percpu")
    listed, sizes = found_for(image, snapshot, EvidenceQuery("percpu", frozenset({entry.payer})))
    reader = PercpuReader(image)
    areas = [
        area
        for chunk in reader.chunks()
        for area in reader.charged(chunk)
        if area.objcg == entry.payer
    ]
    # pcpu_obj_full_size(): the copies of all CPUs, and a pointer for each 4 bytes of one.
    cpus = len(reader.unit_offsets())
    charged = Counter(area.size * cpus + area.size // 4 * 8 for area in areas)
    assert sizes == {("percpu", size, entry.payer): n for size, n in charged.items()}
    known = {area.chunk.base + area.offset: area for area in areas}
    assert listed
    for evidence in listed:
        area = known[evidence.address]
        note = f"{area.size} bytes for each CPU, objcg at {area.element:#x}"
        assert (evidence.kind, evidence.nid, evidence.note) == ("percpu", None, note)
        assert evidence.bytes == area.size * cpus + area.size // 4 * 8
        assert (evidence.objcg, evidence.memcg) == (entry.payer, snapshot.payer(entry.payer))
        assert image.prog.read_word(area.element) & ~7 == entry.payer


def test_entries_of_zswap(image: Image, snapshot: Snapshot) -> None:
    """Each is charged for its compressed length."""
    payer = most(snapshot, "zswap")[0].payer
    listed, sizes = found_for(image, snapshot, EvidenceQuery("zswap", frozenset({payer})))
    amounts = [a for e, a in snapshot.ledger if (e.kind, e.payer) == ("zswap", payer)]
    assert sum(size * number for (_, size, _), number in sizes.items()) == sum(
        amount.bytes for amount in amounts
    )
    assert listed
    for evidence in listed:
        entry = Object(image.prog, "struct zswap_entry *", evidence.address)
        assert (evidence.bytes, evidence.objcg) == (entry.length.value_(), payer)
        assert entry.objcg.value_() == payer
        assert (evidence.kind, evidence.memcg) == ("zswap", snapshot.payer(payer))


def test_each_query_has_its_own(image: Image, snapshot: Snapshot) -> None:
    """Queries of all kinds are answered in one pass, and one for a payer of nothing is empty."""
    kinds: tuple[ChargeKind, ...] = ("slab", "kmem", "lru", "percpu", "zswap")
    nobody = [EvidenceQuery(kind, frozenset({0x1000})) for kind in kinds]
    some = [EvidenceQuery(kind, frozenset({most(snapshot, kind)[0].payer})) for kind in kinds]
    found = find_evidence(image, snapshot, [*nobody, *some])
    assert found.keys() == {*nobody, *some}
    assert [len(found[query].sizes) for query in nobody] == [0] * len(nobody)
    for query in some:
        assert {kind for kind, _, _ in found[query].sizes} == {query.kind}
        assert {payer for _, _, payer in found[query].sizes} == query.payers
        assert found[query].sizes == found_for(image, snapshot, query)[1]
    assert find_evidence(image, snapshot, []) == {}
