# SPDX-License-Identifier: LGPL-2.1-or-later
"""
A bit of the order of a compound page is wrong.

Its pages, and all compound pages behind it, were taken for single ones: a bit made dozens of
findings on memcgs that have nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from drgn import Object, Program
from drgn.helpers.linux.mm import compound_order
from support.guests import Lab
from support.planting import Overlay, Write

from memcg_inspect.collect import audit
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.mm_types import page_layout, scan_pages
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.views.slabinfo import slabinfo

pytestmark = pytest.mark.image

#: No page frame of these guests is a multiple of so many pages, but the first one of a node.
BITS = (0x80, 0x10)


class Heads(NamedTuple):
    """
    Compound pages of an image.

    :ivar found: ``struct page *`` of one of each kind and order
    :ivar charged: the same of those that are charged
    """

    prog: Program
    found: dict[tuple[str, int], int]
    charged: dict[tuple[str, int], int]

    def damaged(self, page: int, bit: int) -> Overlay:
        """Turn a bit of the order of a compound page."""
        image = Image(self.prog)
        at = page + mem_map(image).size + page_layout(image).order
        of_page = Object(self.prog, "struct page *", page)
        order = int(compound_order(of_page))
        overlay = Overlay(self.prog)
        overlay.write((Write(at, bytes([self.prog.read(at, 1)[0] ^ bit])),))
        # drgn finds the order there, too.
        assert int(compound_order(of_page)) == order ^ bit
        return overlay


@pytest.fixture(scope="module", params=["6.1", "7.3"])
def heads(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Heads]:
    prog = lab.image(request.param, "4", "mixed").own_program()
    image, found, charged = Image(prog), dict[tuple[str, int], int](), dict[tuple[str, int], int]()
    frames = mem_map(image)
    size, frames_of_node = frames.size, int(prog["node_data"][1].node_start_pfn)
    for piece in scan_pages(image):
        assert piece.raw is not None and piece.wrong == ()
        slabs, kmem = {slab.page for slab in piece.slabs}, {kmem.page for kmem in piece.kmem}
        for i, order in piece.raw.orders.items():
            page = piece.raw.page + i * size
            # A block of the wrong order could begin with the first page frame of a node.
            if frames.pfn(page) % frames_of_node == 0:
                continue
            kind = "slab" if page in slabs else "kmem" if page in kmem else "user"
            found.setdefault((kind, order), page)
            if Object(prog, "struct page *", page).memcg_data:
                charged.setdefault((kind, order), page)
    assert {kind for kind, _ in found} == {"slab", "kmem", "user"}
    yield Heads(prog, found, charged)


def why_incomplete(heads: Heads, page: int, bits: int) -> str:
    """Damage the order of a compound page; return why an audit does not know it."""
    overlay = heads.damaged(page, bits)
    try:
        report = audit(Image(heads.prog))
    finally:
        overlay.clear()
    assert (report.verdict, list(report.findings)) == ("incomplete", [])
    [missed] = report.coverage["pages"].examples
    assert (missed.what, missed.address) == ("order of a compound page", page)
    return missed.reason


@pytest.mark.parametrize("kind", ["slab", "kmem", "user"])
def test_an_audit_accuses_nobody(heads: Heads, kind: str) -> None:
    orders = [order for of, order in heads.found if of == kind]
    for order, bit in zip((min(orders), max(orders)), BITS, strict=True):
        page = heads.found[kind, order]
        assert why_incomplete(heads, page, bit).startswith(
            f"it is {order ^ bit}, and no compound page"
        )


def other_orders(heads: Heads, kind: str) -> Iterator[tuple[int, int, int]]:
    """Return compound pages, their orders, and other orders that each could have at its place."""
    frames = mem_map(Image(heads.prog))
    for (of, order), page in heads.charged.items():
        if of == kind and order:
            yield page, order, order - 1
            # A folio of user memory may be one that is being split.
            if kind != "user" and frames.pfn(page) % (2 << order) == 0:
                yield page, order, order + 1


@pytest.mark.parametrize("kind", ["slab", "kmem", "user"])
def test_an_order_that_fits_its_place(heads: Heads, kind: str) -> None:
    """Tails tell that it is wrong."""
    tried = 0
    for page, order, other in other_orders(heads, kind):
        assert why_incomplete(heads, page, order ^ other).startswith(f"it is {other}, and ")
        tried += 1
    assert tried


def test_views_are_not_whole(heads: Heads) -> None:
    orders = [order for of, order in heads.found if of == "slab"]
    page = heads.found["slab", max(orders)]
    overlay = heads.damaged(page, BITS[0])
    try:
        found = slabinfo(Image(heads.prog))
    finally:
        overlay.clear()
    assert not found.is_whole
    assert ("order of a compound page", page) in {
        (missed.what, missed.address) for missed in found.coverage["pages"].examples
    }
