# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Zswap entries on two nodes, on the per-node kernel: the rule that they are booked by.

Such entries exist if an allocation of zsmalloc falls back to another node in the middle of a
zspage, which the workload ``straddle`` causes. Another test moves a page of zsmalloc in which no
entry begins to another node, in a copy of an image: the entry is then booked as in the posted
series.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import pytest
from drgn import Object, Program, cast
from drgn.helpers.linux.mm import pfn_to_page
from support.guests import PERNODE_KERNELS, GuestImage, Lab, Plant

from memcg_inspect.collect import collect
from memcg_inspect.image.image import image_of
from memcg_inspect.linux.mm.mmzone import MemMap, mem_map
from memcg_inspect.linux.mm.page_flags import page_flags
from memcg_inspect.linux.mm.zswap import ZswapEntry, ZswapReader
from memcg_inspect.model import Objcg
from memcg_inspect.report import Report

pytestmark = [pytest.mark.image, pytest.mark.parametrize("kernel", PERNODE_KERNELS)]

#: Bits of an object's location in 7.3 on x86-64: the page frame number begins above 24 bits
#: (``MAX_POSSIBLE_PHYSMEM_BITS`` is 52), the index is the lowest 15 of them.
PFN_SHIFT, INDEX_BITS = 24, 15
WORD = 8


class Straddler(NamedTuple):
    """An entry that ends in a page in which no entry begins."""

    entry: int
    objcg: Objcg
    page: int
    nid: int
    beyond: int


def placed(prog: Program, handle: int) -> tuple[tuple[int, ...], int]:
    """Return the pages of an entry's zspage and the entry's offset, by a plain walk."""
    location = prog.read_u64(handle)
    zpdesc = cast("struct zpdesc *", pfn_to_page(prog, location >> PFN_SHIFT))
    zspage = zpdesc.zspage
    size_class = zspage.pool.size_class[zspage.member_("class")]
    pages, at = [], zspage.first_zpdesc
    for _ in range(size_class.pages_per_zspage.value_()):
        pages.append(at.value_())
        at = at.next
    return tuple(pages), (location & (1 << INDEX_BITS) - 1) * size_class.size.value_()


def straddlers(prog: Program, objcgs: dict[int, Objcg]) -> Iterator[Straddler]:
    """Return the entries that are alone in the last page that they reach."""
    frames = mem_map(image_of(prog))
    inside = defaultdict(list)
    for entry in ZswapReader(image_of(prog)).entries():
        if entry.length == frames.page_size:
            continue  # in a page of its own, without a header
        pages, start = placed(prog, entry.handle)
        end = start + WORD + entry.length
        for number in range(start // frames.page_size, (end - 1) // frames.page_size + 1):
            inside[pages[number]].append((entry, start - number * frames.page_size, end, number))
    for page, entries in inside.items():
        [(entry, start, end, number), *others] = entries
        beyond = end - number * frames.page_size
        objcg = objcgs.get(entry.objcg)
        if not others and objcg and start < -WORD and beyond <= frames.page_size:
            nid = frames.nid(prog.read_u64(page + frames.flags))
            yield Straddler(entry.address, objcg, page, nid, beyond)


class Moved(NamedTuple):
    """An entry, what moves its second page to another node, and who should pay there."""

    who: Straddler
    changes: tuple[tuple[str, int | str], ...]
    payer: Objcg

    @property
    def booked(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return what a kernel that follows the physical rule would have booked."""
        left = "Object(prog, 'struct obj_cgroup *', {:#x}).nr_charged_bytes"
        return (
            (left.format(self.who.objcg.address), f"old + {self.who.beyond}"),
            (left.format(self.payer.address), f"old - {self.who.beyond}"),
        )


def node_shift(frames: MemMap) -> int:
    """Return the shift of the node in page flags (``NODES_PGSHIFT``)."""
    return next(
        bit for bit in range(64)
        if all(
            frames.nid(1 << bit << n) == 1 << n and frames.nid(0) == 0 for n in range(2)
        )
    )  # fmt: skip


def counted(prog: Program, flags: int, nid: int, other: int) -> tuple[tuple[str, str], ...]:
    """Return what counts a page on another node, as zs_page_migrate() does."""
    zone = page_flags(image_of(prog)).zone.get(flags)
    place = f"node_data[{{}}].node_zones[{zone}].vm_stat[NR_ZSPAGES].counter"
    return (place.format(nid), "old - 1"), (place.format(other), "old + 1")


def moved(prog: Program) -> Moved:
    objcgs = dict(collect(image_of(prog)).objcgs)
    frames = mem_map(image_of(prog))
    shift = node_shift(frames)
    for who in straddlers(prog, objcgs):
        for address in who.objcg.siblings:
            payer = objcgs[address]
            # as much is left over of its pages, so that no page changes hands
            if payer.nid not in (None, who.nid) and payer.nr_charged_bytes >= who.beyond:
                place = who.page + frames.flags
                flags = prog.read_u64(place)
                flags = flags & ~(who.nid << shift) | payer.nid << shift
                assert frames.nid(flags) == payer.nid
                changes = ((f"u64:{place:#x}", flags), *counted(prog, flags, who.nid, payer.nid))
                return Moved(who, changes, payer)
    raise AssertionError("no entry of this image can be moved")


@lru_cache(maxsize=1)
def take(lab: Lab, kernel: str) -> tuple[GuestImage, Moved]:
    image = lab.image(kernel, "4", "mixed")
    return image, moved(image.program())


def follows(report: Report) -> str:
    assert report.follows is not None
    # what is booked by one rule does not cast doubt on the other kind
    assert report.follows["percpu"] in ("physical", "both")
    return report.follows["zswap"]


def on_two_nodes(prog: Program) -> dict[int, tuple[int, int, int]]:
    """
    Return the first node, the last node, and the bytes on the last node, of each entry on two
    nodes that a memcg below the root pays for, by a plain walk.
    """
    frames, found = mem_map(image_of(prog)), {}
    for entry in ZswapReader(image_of(prog)).entries():
        root = Object(prog, "struct obj_cgroup *", entry.objcg).is_root
        if entry.length == frames.page_size or root:
            continue
        pages, start = placed(prog, entry.handle)
        number = start // frames.page_size
        beyond = start + WORD + entry.length - (number + 1) * frames.page_size
        if beyond > 0:
            begins, ends = (
                frames.nid(prog.read_u64(pages[n] + frames.flags)) for n in (number, number + 1)
            )
            if begins != ends:
                found[entry.address] = begins, ends, beyond
    return found


def in_first_pages(image: GuestImage) -> Iterator[tuple[GuestImage, int, ZswapEntry]]:
    """Return each entry on two nodes that begins in the first page of its zspage, and that page."""
    prog = image.program()
    for address in on_two_nodes(prog):
        entry = ZswapReader(image_of(prog)).entry(address)
        (first, *_), start = placed(prog, entry.handle)
        if start < mem_map(image_of(prog)).page_size:
            yield image, first, entry


def test_the_lab_kernel_books_each_part_where_it_is(lab: Lab, kernel: str) -> None:
    image = lab.image(kernel, "4", "straddle")
    prog, report = image.program(), image.report()
    assert follows(report) == "physical"
    assert (report.findings, report.verdict) == ((), "exact")
    straddling = on_two_nodes(prog)
    # each memcg has pushed out memory of one node
    assert len({begins for begins, _, _ in straddling.values()}) > 1
    for address, (begins, ends, beyond) in straddling.items():
        entry = Object(prog, "struct zswap_entry *", address)
        assert (entry.beyond.value_(), entry.beyond_nid.value_()) == (beyond, ends)
        assert entry.objcg.nid.value_() == begins
    for found in ZswapReader(image_of(prog)).entries():
        objcg = Object(prog, "struct obj_cgroup *", found.objcg)
        assert bool(found.beyond) == (found.address in straddling) or objcg.is_root


def test_data_that_was_moved_is_paid_for_as_before(lab: Lab, plant: Plant, kernel: str) -> None:
    """The first page of a zspage moved to another node, as by a migration: the charge stays."""
    # The kernel ignores the word. Not every image has such an entry.
    images = (lab.image(kernel, "4", "straddle", append=f"lab.try={n}" * (n > 0)) for n in range(5))
    image, page, entry = next(found for image in images for found in in_first_pages(image))
    prog, frames = image.program(), mem_map(image_of(image.program()))
    free = min({0, 1, 2, 3} - set(on_two_nodes(prog)[entry.address][:2]))
    place = page + frames.flags
    flags = prog.read_u64(place)
    begins = frames.nid(flags)
    moved_to = flags & ~(begins << node_shift(frames)) | free << node_shift(frames)
    report = plant(image, (f"u64:{place:#x}", moved_to), *counted(prog, flags, begins, free))
    assert follows(report) == "physical"
    assert {(f.kind, f.identity) for f in report.findings} == {("skew", "zswap")}
    moved = {e.address: e.bytes for f in report.findings for e in f.evidence}
    assert moved[entry.address] == entry.length - entry.beyond
    assert {f.nid for f in report.findings} == {free}
    assert not [row for row in report.rows if row.status == "differs"]


def test_booked_as_posted(lab: Lab, plant: Plant, kernel: str) -> None:
    image, (who, changes, payer) = take(lab, kernel)
    assert follows(image.report()) == "both"
    report = plant(image, *changes)
    assert follows(report) == "posted"
    assert {f.kind for f in report.findings} == {"rule"}
    assert {f.nid for f in report.findings} == {who.nid, payer.nid}
    assert len({f.memcg for f in report.findings}) == 1
    for finding in report.findings:
        assert finding.what.startswith("zswap entries are booked by the posted rule")
        [evidence] = finding.evidence
        assert (evidence.address, evidence.bytes) == (who.entry, who.beyond)
        assert (evidence.nid, evidence.objcg) == (payer.nid, who.objcg.address)
    # the kernel is off by the same amount on both nodes
    assert {f.difference % 4096 for f in report.findings if f.identity == "objcg_bytes"} == {
        who.beyond, 4096 - who.beyond,
    }  # fmt: skip


def test_a_kernel_that_books_them_by_their_pages(lab: Lab, plant: Plant, kernel: str) -> None:
    image, found = take(lab, kernel)
    report = plant(image, *found.changes, *found.booked)
    assert follows(report) == "physical"
    assert (report.findings, report.verdict) == ((), "exact")


def test_bytes_that_neither_rule_explains(lab: Lab, plant: Plant, kernel: str) -> None:
    image, found = take(lab, kernel)
    more = (found.booked[0][0], "old + 8")
    report = plant(image, *found.changes, more)
    assert report.follows == {"percpu": "neither", "zswap": "neither"}
    assert "rule" not in {f.kind for f in report.findings}
    named = {(f.objcg, f.identity) for f in report.findings}
    assert (found.who.objcg.address, "objcg_bytes") in named
