# SPDX-License-Identifier: LGPL-2.1-or-later
"""References to call sites, added up. What readers return is written here."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.checks.ledger import Amount
from memcg_inspect.checks.profile import Use
from memcg_inspect.collect import call_sites
from memcg_inspect.collect.call_sites import CallSiteCounter, CallSites
from memcg_inspect.collect.partial import Partial
from memcg_inspect.linux.mm.percpu import PcpuArea
from memcg_inspect.linux.mm.slab import Slab, SlabCache
from memcg_inspect.model import Coverage

#: ``struct codetag *``, and ``CODETAG_EMPTY``.
TAG, OTHER, EMPTY = 0xC000, 0xC100, 1
OBJCG = 0x1000
DENTRY = SlabCache(0xD0, "dentry", 200, 192, 0, True, 208, accounts=True)
FILP = DENTRY._replace(address=0xF0, name="filp", accounts=False)


class Readers:
    """
    Takes the place of the readers of an image.

    :ivar tagged: objects of a slab by call site and obj_cgroup; ``None`` if they are unreadable
    :ivar left: what is left of the call sites that are not known
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.image: Any = None
        self.coverage: dict[str, Coverage] = {}
        self.tagged_objects: dict[tuple[int, int], int] | None = {}
        self.has_codetags = True
        self.pages: list[SimpleNamespace] = []
        self.asked: set[int] = set()
        for name, given in (
            ("mem_map", lambda _: SimpleNamespace(page_size=4096)),
            ("PageTagReader", lambda _: SimpleNamespace(read=lambda piece: self.pages)),
            ("read_call_sites", lambda *_: {TAG: "a site"}),
            ("read_left_behind", self._left_behind),
        ):
            monkeypatch.setattr(call_sites, name, given)

    def _left_behind(self, image: object, tags: set[int], coverage: Coverage) -> dict[int, str]:
        self.asked |= tags
        return dict.fromkeys(tags, "left behind")

    def tagged(self, slab: Slab) -> dict[tuple[int, int], int]:
        if self.tagged_objects is None:
            raise FaultError("not in the image", 0x1230)
        return self.tagged_objects

    def codetags(self, slab: Slab) -> int | None:
        return 0x10 if self.has_codetags else None

    def count(self, partial: Partial, cache: SlabCache) -> None:
        slab = Slab(0x40, 2, 1, cache, 10, 9, None, {}, b"")
        CallSiteCounter(self.image).add_slab(partial, slab, self)  # type: ignore[arg-type]

    # What is used of a PercpuReader.

    def data_nodes(self, area: PcpuArea) -> Counter[int]:
        return Counter({0: 2 * area.size, 1: area.size})

    def metadata_nodes(self, area: PcpuArea) -> Counter[int]:
        return Counter({1: 8, 3: 8})


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Readers:
    return Readers(monkeypatch)


def test_objects_of_a_slab(readers: Readers) -> None:
    partial = Partial()
    readers.tagged_objects = {(TAG, OBJCG): 3, (TAG, 0): 2, (OTHER, 0): 1}
    readers.count(partial, DENTRY)
    for has_codetags in (True, False):
        readers.has_codetags = has_codetags
        readers.count(partial, FILP)
    assert partial.uses == {
        Use(TAG, "slab", OBJCG, 2): Amount(3 * 600, 3 * 3),
        Use(TAG, "slab", 0, 2): Amount(3 * 400, 3 * 2),
        Use(OTHER, "slab", 0, 2): Amount(3 * 200, 3),
    }
    # A cache that accounts all of its objects should have none that nobody pays for.
    assert partial.uncharged == {(0xD0, TAG): 2, (0xD0, OTHER): 1}
    # The last slab has no codetags.
    assert partial.coverage["slab_tags"].read == 2


def test_objects_of_a_slab_that_are_not_in_the_image(readers: Readers) -> None:
    partial, readers.tagged_objects = Partial(), None
    readers.count(partial, DENTRY)
    (missed,) = partial.coverage["slab_tags"].examples
    assert (missed.what, missed.address) == ("codetags of a dentry slab", 0x40)
    assert (partial.uses, partial.coverage["slab_tags"].read) == ({}, 0)


def test_pages(readers: Readers) -> None:
    partial = Partial()
    readers.pages = [
        SimpleNamespace(codetag=TAG, kind="lru", payer=OBJCG, nid=1, calls=2, pages=5),
        SimpleNamespace(codetag=TAG, kind="page", payer=0, nid=0, calls=1, pages=1),
    ]
    counter = CallSiteCounter(readers.image)
    counter.add_pages(partial, None)  # type: ignore[arg-type]
    assert partial.uses == {
        Use(TAG, "lru", OBJCG, 1): Amount(5 * 4096, 2),
        Use(TAG, "page", 0, 0): Amount(4096, 1),
    }
    assert counter._pages.coverage is partial.coverage["page_tags"]


def area(codetag: int, size: int = 100) -> PcpuArea:
    return PcpuArea(None, 0, size, OBJCG, 0, codetag)  # type: ignore[arg-type]


def test_percpu_allocations(readers: Readers) -> None:
    """One allocation is one call, though its memory is on several nodes."""
    sites = CallSites(readers.image, readers.coverage)
    add = sites.percpu(readers)  # type: ignore[arg-type]
    for codetag in (TAG, TAG, OTHER, EMPTY, 0):
        add(area(codetag))
    found = dict(sites.profile)
    for codetag, number in ((TAG, 2), (OTHER, 1)):
        amounts = {nid: found[Use(codetag, "percpu", OBJCG, nid)] for nid in (0, 1, 3)}
        assert {nid: amount.bytes for nid, amount in amounts.items()} == {
            0: number * 200,
            1: number * 108,
            3: number * 8,
        }
        assert sum(amount.charges for amount in amounts.values()) == number
    assert len(found) == 6
    assert sites.profile.one_cpu == {TAG: 200, OTHER: 100}


def test_a_profile(readers: Readers) -> None:
    """Call sites that something refers to and that are not known are those of unloaded modules."""
    sites, total = CallSites(readers.image, readers.coverage), Partial()
    assert set(readers.coverage) == {"call_sites", "slab_tags", "page_tags"}
    total.use(Use(TAG, "slab", 0, 0), 64, 2)
    total.use(Use(OTHER, "slab", 0, 0), 32, 1)
    total.uncharged[0xD0, TAG] = 3
    profile = sites.finish(total)
    assert dict(profile) == {
        Use(TAG, "slab", 0, 0): Amount(64, 2),
        Use(OTHER, "slab", 0, 0): Amount(32, 1),
    }
    assert profile.uncharged == {(0xD0, TAG): 3}
    assert readers.asked == {OTHER}
    assert profile.sites == {TAG: "a site", OTHER: "left behind"}
    assert (profile.missing, profile.why_not) == (None, None)


@pytest.mark.parametrize(
    "subject",
    ["pages", "slab_pages", "slab", "percpu", "call_sites", "slab_tags", "page_tags"],
)
def test_references_may_be_missing(readers: Readers, subject: str) -> None:
    """If anything that can hold one could not be read. Other things are of no importance."""
    total = Partial(coverage=defaultdict(Coverage))
    total.coverage["stock"].miss("stock", 0x10, "not in the image")
    assert CallSites(readers.image, readers.coverage).finish(total).missing is None
    total.coverage[subject].miss("something", 0x10, "not in the image")
    found = CallSites(readers.image, readers.coverage).finish(total)
    assert found.missing == "references to call sites are not all in the image"
