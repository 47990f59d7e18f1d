# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Slabs, added up. The slabs are written down here, so that every sum can be worked out by hand.

``tests/linux/test_slab_usage.py`` and ``tests/views/test_who.py`` compare the sums with real slabs.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

import pytest
from support.guests import Lab

from memcg_inspect.collect.slab_cells import LARGE_KMALLOC, SlabCell, SlabCells, SlabKey
from memcg_inspect.collect.slab_tally import SlabTally
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.kfence import kfence_pages
from memcg_inspect.linux.mm.mm_types import KmemPage, PagePiece, scan_pages
from memcg_inspect.linux.mm.slab import Slab, SlabCache
from memcg_inspect.linux.mm.slab_groups import SlabGroup

DENTRY = SlabCache(0xC0, "dentry", 200, 192, 0, True, 208, accounts=True)
FILP = SlabCache(0xF0, "filp", 300, 256, 0, False, 308)
#: obj_cgroups, the memcgs that pay for their charges, and one that no memcg is known for.
ONE, ALSO_ONE, TWO, LOST = 0x1000, 0x1100, 0x2000, 0x3000
PAYERS = {ONE: 0x10, ALSO_ONE: 0x10, TWO: 0x20}


def slab(
    cache: SlabCache,
    charged: Mapping[int, int] | None,
    inuse: int = 9,
    nid: int = 1,
    page: int = 0x40,
    order: int = 1,
) -> Slab:
    return Slab(page, nid, order, cache, 10, inuse, None, charged, b"")


def filled(cell: SlabCell) -> dict[str, object]:
    """Return the sums of a cell that are not 0 or empty."""
    return {name: value for name, value in asdict(cell).items() if value}


def test_a_tally_of_slabs() -> None:
    tally = SlabTally()
    tally.add(slab(DENTRY, {ONE: 3, TWO: 2}), False)
    tally.add(slab(DENTRY, {}, inuse=4, order=2), False)
    tally.add(slab(DENTRY, {ONE: 1}, inuse=0), True)
    tally.add(slab(FILP, {}, nid=0), False)
    first, pool, dentry = tally.usage()[0], *tally.usage()[1:][::-1]
    assert (first.cache, first.nid, first.charged, first.kfence) == ("filp", 0, 0, False)
    assert (first.address, first.reclaimable, first.accounts) == (0xF0, False, False)
    assert (first.size, first.charge) == (300, 308)
    dentry, pool = (dentry, pool) if not dentry.kfence else (pool, dentry)
    assert (dentry.cache, dentry.nid, dentry.address) == ("dentry", 1, 0xC0)
    assert (dentry.reclaimable, dentry.accounts, dentry.kfence) == (True, True, False)
    assert (dentry.size, dentry.charge) == (200, 208)
    assert (dentry.slabs, dentry.pages, dentry.objects) == (2, 2 + 4, 20)
    assert (dentry.inuse, dentry.charged) == (13, 5)
    assert (pool.slabs, pool.inuse, pool.charged, pool.kfence) == (1, 0, 1, True)


def test_one_slab_whose_vector_is_unreadable_makes_the_number_unknown() -> None:
    """It stays unknown, whatever is added before or after, one by one, in groups or in a merge."""
    group = SlabGroup(DENTRY, 1)
    group.slabs, group.pages, group.objects, group.inuse = 2, 4, 20, 15
    group.charged = Counter({ONE: 3, TWO: 4})
    known, unknown = SlabTally(), SlabTally()
    known.add(slab(DENTRY, {ONE: 3}), False)
    known.add_group(group)
    (usage,) = known.usage()
    assert (usage.slabs, usage.pages, usage.objects, usage.inuse) == (3, 6, 30, 24)
    assert usage.charged == 10
    unknown.add(slab(DENTRY, None), False)
    unknown.add(slab(DENTRY, {ONE: 3}), False)
    unknown.add_group(group)
    (usage,) = unknown.usage()
    assert (usage.slabs, usage.inuse, usage.charged) == (4, 33, None)
    for first, second in ((known, unknown), (unknown, known), (known, known)):
        total = SlabTally()
        total.merge(first)
        total.merge(second)
        (usage,) = total.usage()
        assert usage.charged == (20 if second is first else None)
        assert usage.slabs == first.usage()[0].slabs + second.usage()[0].slabs
        assert usage.pages == first.usage()[0].pages + second.usage()[0].pages
        assert usage.objects == first.usage()[0].objects + second.usage()[0].objects
        assert usage.inuse == first.usage()[0].inuse + second.usage()[0].inuse


def test_a_tally_is_sorted_by_node_name_and_address() -> None:
    tally = SlabTally()
    twin = DENTRY._replace(address=0x50)
    for cache, nid in ((FILP, 1), (DENTRY, 1), (twin, 1), (FILP, 0)):
        tally.add(slab(cache, {}, nid=nid), False)
    order = [(usage.nid, usage.cache, usage.address) for usage in tally.usage()]
    assert order == [(0, "filp", 0xF0), (1, "dentry", 0x50), (1, "dentry", 0xC0), (1, "filp", 0xF0)]


@pytest.fixture(scope="module")
def image(lab: Lab) -> Image:
    """Return an image for the size of its pages, and its pool of KFENCE."""
    return image_of(lab.image("7.3").program())


@pytest.mark.image
def test_a_slab_of_two_payers(image: Image) -> None:
    """Two obj_cgroups of one memcg are one payer. What nobody pays for is the rest of inuse."""
    cells = SlabCells(image, PAYERS.get)
    cells.add(slab(DENTRY, {ONE: 2, ALSO_ONE: 1, TWO: 4}, order=2))
    one, two, nobody = (SlabKey(payer, 0xC0, 1) for payer in (0x10, 0x20, None))
    assert cells.cells.keys() == {one, two, nobody}
    of_slab = {"slabs": 1, "pages": 4, "room": 2000, "shared": 1, "others": {0x10, 0x20, None}}
    paid = {"objects": 3, "bytes": 600, "charged": 624, "in_slabs": 600}
    assert filled(cells.cells[one]) == paid | of_slab
    paid = {"objects": 4, "bytes": 800, "charged": 832, "in_slabs": 800}
    assert filled(cells.cells[two]) == paid | of_slab
    assert filled(cells.cells[nobody]) == {"objects": 2, "bytes": 400, "in_slabs": 400} | of_slab
    assert filled(cells.slabs[0xC0, 1]) == {"slabs": 1, "pages": 4, "room": 2000}
    assert cells.nodes == {
        (1, "reclaimable"): Counter(slab_bytes=4 << 12, paid=7 * 200, unpaid=2 * 200)
    }
    assert cells.caches == {0xC0: DENTRY}
    assert cells.are_all_known
    assert cells.unread == {}


@pytest.mark.image
def test_slabs_of_one_payer_and_of_none(image: Image) -> None:
    cells = SlabCells(image, PAYERS.get)
    cells.add(slab(FILP, {ONE: 9}, nid=0))
    cells.add(slab(FILP, {}, inuse=5, nid=0))
    cells.add(slab(FILP, {}, inuse=0, nid=0))  # has no objects: it is no slab of a payer
    cells.add(slab(FILP, {TWO: 3}, inuse=2, nid=0))  # a free object that is still charged
    assert {key.payer: filled(cell) for key, cell in cells.cells.items()} == {
        0x10: {
            "objects": 9,
            "bytes": 2700,
            "charged": 9 * 308,
            "in_slabs": 2700,
            "slabs": 1,
            "pages": 2,
            "room": 3000,
        },
        None: {
            "objects": 5,
            "bytes": 1500,
            "in_slabs": 1500,
            "slabs": 1,
            "pages": 2,
            "room": 3000,
        },
        0x20: {
            "objects": 3,
            "bytes": 900,
            "charged": 3 * 308,
            "in_slabs": 900,
            "slabs": 1,
            "pages": 2,
            "room": 3000,
        },
    }
    assert filled(cells.slabs[0xF0, 0]) == {"slabs": 3, "pages": 6, "room": 9000}
    assert +cells.nodes[0, "unreclaimable"] == Counter(
        slab_bytes=4 * 2 << 12, paid=12 * 300, unpaid=5 * 300
    )


@pytest.mark.image
def test_a_slab_of_one_payer_and_of_nobody(image: Image) -> None:
    cells = SlabCells(image, PAYERS.get)
    cells.add(slab(DENTRY, {ONE: 2}, inuse=3))
    shared = {key.payer: (cell.shared, cell.others) for key, cell in cells.cells.items()}
    assert shared == {0x10: (1, {0x10, None}), None: (1, {0x10, None})}


@pytest.mark.image
def test_a_slab_whose_vector_is_unreadable(image: Image) -> None:
    """Its objects in use are nobody's and everybody's: they stand apart."""
    cells = SlabCells(image, PAYERS.get)
    cells.add(slab(DENTRY, None, inuse=7))
    assert cells.cells == {}
    assert filled(cells.unread[0xC0, 1]) == {"objects": 7, "bytes": 1400, "in_slabs": 1400}
    assert cells.nodes[1, "reclaimable"]["unknown"] == 1
    assert cells.nodes[1, "reclaimable"]["slab_bytes"] == 2 << 12
    assert filled(cells.slabs[0xC0, 1]) == {"slabs": 1, "pages": 2, "room": 2000}
    assert not cells.are_all_known


@pytest.mark.image
def test_a_payer_that_is_not_known(image: Image) -> None:
    asked: list[int] = []

    def payer(objcg: int) -> int | None:
        asked.append(objcg)
        return PAYERS.get(objcg)

    cells = SlabCells(image, payer)
    cells.add(slab(DENTRY, {ONE: 1}))
    assert cells.are_all_known
    cells.add(slab(DENTRY, {LOST: 2, ONE: 1}))
    cells.add(slab(DENTRY, {ONE: 1}))
    assert not cells.are_all_known
    assert cells.has_unknown
    assert cells.cells[SlabKey(0, 0xC0, 1)].objects == 2
    assert sorted(asked) == [ONE, LOST]  # each is looked up once


@pytest.mark.long
@pytest.mark.image
def test_an_object_of_kfence_is_in_no_slab(lab: Lab) -> None:
    image = image_of(lab.image("7.3", "4", "mixed", append="kfence.sample_interval=1").program())
    page = min(kfence_pages(image))
    cells = SlabCells(image, PAYERS.get)
    cells.add(slab(DENTRY, {ONE: 1}, inuse=0, page=page))
    key = SlabKey(0x10, 0xC0, 1)
    assert cells.cells.keys() == {key}
    assert filled(cells.cells[key]) == {"objects": 1, "bytes": 200, "charged": 208}
    assert cells.nodes == {}
    assert cells.slabs == {}
    assert cells.caches == {0xC0: DENTRY}


def large(image: Image, marked: Counter[int]) -> PagePiece:
    return next(scan_pages(image))._replace(large_kmalloc=marked)


@pytest.mark.image
def test_large_kmallocs(image: Image) -> None:
    """The kernel marks all of them by node. Those that no memcg pays for are the rest."""
    cells = SlabCells(image, PAYERS.get)
    cells.add_large(KmemPage(0x40, 1, 2, True, "large_kmalloc", ONE), 4)
    cells.add_larges(ALSO_ONE, 1, 4, 2)
    cells.add_larges(TWO, 0, 8, 1)
    size = 4 << 12
    assert cells.cells.keys() == {SlabKey(0x10, -size, 1), SlabKey(0x20, -2 * size, 0)}
    assert filled(cells.cells[SlabKey(0x10, -size, 1)]) == {
        "objects": 3,
        "slabs": 3,
        "pages": 12,
        "has_large": True,
        **dict.fromkeys(("bytes", "charged", "in_slabs", "room"), 3 * size),
    }
    assert cells.unpaid_large() == {}  # the kernel does not mark them
    assert cells.nodes == {
        (1, LARGE_KMALLOC): Counter(paid=3 * size),
        (0, LARGE_KMALLOC): Counter(paid=2 * size),
    }
    cells.add(slab(FILP, {}, nid=2))  # slabs are no large kmallocs
    cells.add_all_large(large(image, Counter({1: 10, 0: 4})))
    cells.add_all_large(large(image, Counter({1: 7, 0: 4})))
    assert {nid: filled(cell) for nid, cell in cells.unpaid_large().items()} == {
        1: {
            **dict.fromkeys(("bytes", "in_slabs", "room"), 5 << 12),
            "pages": 5,
            "has_large": True,
            "has_uncounted": True,
        }
    }


@pytest.mark.image
def test_parts_add_up_to_the_whole(image: Image) -> None:
    """Another process has read a part: it is pickled on its way."""
    slabs = [
        slab(DENTRY, {ONE: 2, TWO: 1}),
        slab(DENTRY, None, inuse=3),
        slab(FILP, {TWO: 4}, nid=0),
        slab(DENTRY, {TWO: 1}, inuse=8),
        slab(DENTRY, None, inuse=1),
        slab(FILP, {LOST: 1}, nid=0, inuse=1),
    ]
    whole, total = SlabCells(image, PAYERS.get), SlabCells(image, PAYERS.get)
    for part in (slabs[:3], slabs[3:], []):
        found = SlabCells(image, PAYERS.get)
        for each in part:
            found.add(each)
            whole.add(each)
        for to in (found, whole):
            to.add_larges(ONE, 1, 4, 1)
            to.add_all_large(large(image, Counter({1: 8})))
        total.merge(pickle.loads(pickle.dumps(found)))
    assert total.cells == whole.cells
    assert total.slabs == whole.slabs
    assert total.unread == whole.unread
    assert total.nodes == whole.nodes
    assert total.caches == whole.caches
    assert total.has_unknown
    assert total.unpaid_large() == whole.unpaid_large()


@pytest.mark.image
def test_objects_and_slabs_of_cells_are_added_apart(image: Image) -> None:
    """A view that joins cells of one slab adds their objects, and the slab once."""
    one = SlabCell(1, 2, 3, 4, 5, 6, 7, 8, {1}, True, True)
    objects, slabs = SlabCell(), SlabCell()
    for _ in range(2):
        objects.merge_objects(one)
        slabs.merge_slabs(SlabCell(1, 2, 3, 4, 5, 6, 7, 8, {2}))
    slabs.merge_slabs(one)
    assert filled(objects) == {
        "objects": 2,
        "bytes": 4,
        "charged": 6,
        "in_slabs": 8,
        "has_large": True,
        "has_uncounted": True,
    }
    objects.merge_objects(SlabCell())
    assert objects.has_large
    assert objects.has_uncounted
    assert filled(slabs) == {"slabs": 15, "pages": 18, "room": 21, "shared": 24, "others": {1, 2}}
