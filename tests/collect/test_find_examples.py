# SPDX-License-Identifier: LGPL-2.1-or-later
"""Addresses of some charges: as many as there are charges, and what drgn finds there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Set

import pytest
from drgn import Object
from drgn.helpers.linux.mm import (
    compound_head,
    follow_page,
    for_each_page,
    page_to_pfn,
    page_to_virt,
    virt_to_page,
    virt_to_pfn,
)
from drgn.helpers.linux.slab import slab_object_info
from support.guests import Lab
from support.missing_pages import without
from support.reference import node_spans, object_objcg

from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import collect
from memcg_inspect.collect.examples import MOST, Examples, find_examples
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.mmzone import mem_map, page_ranges
from memcg_inspect.model import Coverage

pytestmark = pytest.mark.image

ALL: tuple[ChargeKind, ...] = ("slab", "kmem", "lru", "percpu", "sock", "zswap")


@pytest.fixture(scope="module")
def image(lab: Lab) -> Image:
    # With debug info, which drgn's helpers of slabs need.
    return image_of(lab.image("7.3", "4", "mixed").program(dwarf=True))


@pytest.fixture(scope="module")
def snapshot(image: Image) -> Snapshot:
    return collect(image)


def examples(
    image: Image, snapshot: Snapshot, kinds: Set[ChargeKind] = frozenset(ALL)
) -> tuple[Examples, dict[str, Coverage]]:
    """Return examples of all payers."""
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    objcgs, memcgs = frozenset(snapshot.objcgs), frozenset(snapshot.memcgs)
    return find_examples(image, objcgs, memcgs, kinds, coverage), coverage


def test_there_are_examples_of_each_entry(image: Image, snapshot: Snapshot) -> None:
    """Percpu memory has no detail there, and a charge to one obj_cgroup may be on several nodes."""
    found, coverage = examples(image, snapshot)
    assert not any(part.unreadable for part in coverage.values())
    wanted = {
        entry: amount.charges
        for entry, amount in snapshot.ledger
        if entry.kind in ("slab", "kmem", "sock", "zswap")
    }
    assert {entry.kind for entry in wanted} >= {"slab", "kmem", "zswap"}
    some = {entry: at for entry, at in found.addresses.items() if entry.kind != "percpu"}
    assert {entry: len(at) for entry, at in some.items()} == {
        entry: min(MOST, charges) for entry, charges in wanted.items()
    }
    assert all(len(set(at)) == len(at) for at in found.addresses.values())
    of_cpus = {
        (e.payer, e.nid) for e, _ in snapshot.ledger if e.kind == "percpu" and e.detail == "data"
    }
    assert {(e.payer, e.nid) for e in found.addresses if e.kind == "percpu"} == of_cpus
    assert {e.detail for e in found.addresses if e.kind == "percpu"} == {""}


def test_objects_are_charged_to_whom_it_says(image: Image, snapshot: Snapshot) -> None:
    found, spans, seen = examples(image, snapshot, {"slab"})[0], node_spans(image.prog), 0
    for entry, addresses in found.addresses.items():
        if entry.kind != "slab":
            continue
        for address in addresses:
            info = slab_object_info(Object(image.prog, "void *", address))
            assert info is not None
            assert info.address == address
            pfn = virt_to_pfn(Object(image.prog, "void *", address)).value_()
            assert next(nid for start, end, nid in spans if start <= pfn < end) == entry.nid
            size, pad = info.slab_cache.size.value_(), info.slab_cache.red_left_pad.value_()
            first = page_to_virt(compound_head(virt_to_page(image.prog, address))).value_() + pad
            number = (address - first) // size
            assert object_objcg(info.slab, info.slab_cache, number) == entry.payer
            flag = bool(info.slab_cache.flags.value_() & reclaimable(image))
            assert entry.detail == ("reclaimable" if flag else "unreclaimable")
            seen += 1
    assert seen > 30


def reclaimable(image: Image) -> int:
    """``SLAB_RECLAIM_ACCOUNT``."""
    return 1 << image.prog["_SLAB_RECLAIM_ACCOUNT"].value_()


def test_user_pages_are_all_told(image: Image, snapshot: Snapshot) -> None:
    """By payer and node as much as is charged; and drgn finds the mapping of each example."""
    found, pages = examples(image, snapshot, {"lru"})[0], Counter[tuple[int, int]]()
    for (payer, nid, mapping, _), group in found.folios.items():
        pages[payer, nid] += group.pages
        assert len(group.addresses) == min(MOST, group.folios)
        assert group.pages >= group.folios
        for address in group.addresses:
            page = virt_to_page(image.prog, address)
            assert page.mapping.value_() == mapping
            assert page.memcg_data.value_() == payer
    assert pages == {
        (entry.payer, entry.nid): amount.bytes >> 12
        for entry, amount in snapshot.ledger
        if entry.kind == "lru"
    }
    folios = sum(group.folios for group in found.folios.values())
    assert folios == sum(a.charges for entry, a in snapshot.ledger if entry.kind == "lru")


def test_only_what_is_asked_for(image: Image, snapshot: Snapshot) -> None:
    assert examples(image, snapshot, {"percpu"})[0].folios == {}
    for kind in ("percpu", "zswap"):
        assert {e.kind for e in examples(image, snapshot, {kind})[0].addresses} == {kind}
    coverage: defaultdict[str, Coverage] = defaultdict(Coverage)
    nobody = find_examples(image, set(), set(), set(ALL), coverage)
    assert nobody.addresses == nobody.folios == {}
    assert coverage["folios"].read == sum(1 for _ in for_each_page(image.prog))
    payer = next(entry.payer for entry, _ in snapshot.ledger if entry.kind == "slab")
    one = find_examples(image, {payer}, set(), set(ALL), coverage)
    assert {entry.payer for entry in one.addresses} == {payer}
    assert {found[0] for found in one.folios} <= {payer}


def test_a_part_of_the_memory_map_that_is_missing(lab: Lab, snapshot: Snapshot) -> None:
    guest = lab.image("7.3", "4", "mixed")
    prog = guest.program()
    frames, pages = mem_map(image_of(prog)), page_ranges(image_of(prog))[-1]
    middle = frames.page((pages.start + pages.end) // 2)
    hidden = follow_page(prog["init_mm"].address_of_(), middle)
    _, coverage = examples(
        image_of(without(guest, {page_to_pfn(hidden).value_()})), snapshot, {"lru"}
    )
    assert coverage["folios"].unreadable == 1
    assert coverage["folios"].examples[0].reason == "not in the image"
