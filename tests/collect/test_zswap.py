# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which entries of zswap are added to the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.checks.ledger import Amount, Entry, Ledger
from memcg_inspect.collect.pernode import PerNode
from memcg_inspect.collect.zswap import ZswapExamples, add_zswap
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.zswap import ZswapEntry, ZswapReader
from memcg_inspect.model import NUMA_NO_NODE, Coverage, Objcg

CHARGED, ROOT, UNKNOWN = 0x1000, 0x2000, 0x3000


class Reader:
    """Entries that all are on node 1."""

    def __init__(self, image: Image, found: list[ZswapEntry]) -> None:
        self.image, self.coverage, self._found = image, Coverage(), found

    def entries(self) -> Iterator[ZswapEntry]:
        return iter(self._found)

    def nodes(self, entry: ZswapEntry) -> dict[int, int]:
        return {1: entry.length}


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_the_root_pays_for_nothing(lab: Lab, kernel: str) -> None:
    """obj_cgroup_charge_zswap() returns for the obj_cgroups of the root. Unknown ones are kept."""
    image = image_of(lab.image(kernel).program())
    entries = [
        ZswapEntry(number, 100 + number, 0, payer)
        for number, payer in enumerate((CHARGED, ROOT, UNKNOWN, 0), 1)
    ]
    ledger = Ledger()
    objcgs = {
        CHARGED: Objcg(CHARGED, 0x10, 1, False, 0),
        ROOT: Objcg(ROOT, 0x20, 1, True, 0),
    }
    reader = cast("ZswapReader", Reader(image, entries))
    add_zswap(ledger, reader, objcgs, None, True)
    assert {(entry.payer, amount.bytes, amount.charges) for entry, amount in ledger} == {
        (CHARGED, 101, 1),
        (UNKNOWN, 103, 1),
    }


def entries_of(image: Image, found: list[ZswapEntry]) -> ZswapReader:
    return cast("ZswapReader", Reader(image, found))


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_what_is_told_of_entries(lab: Lab, kernel: str) -> None:
    """A page that cannot be compressed is stored as it is. Three examples are kept of each sort."""
    image = image_of(lab.image(kernel).program())
    found = [
        *(ZswapEntry(number, 100, 0, CHARGED) for number in range(1, 6)),
        ZswapEntry(6, 4096, 0, CHARGED),
        ZswapEntry(7, 100, 0, UNKNOWN, listed=False),
    ]
    ledger, examples = Ledger(), ZswapExamples()
    added = add_zswap(ledger, entries_of(image, found), {}, None, True, examples)
    compressed = Entry(CHARGED, "zswap", "compressed", 1)
    incompressible = compressed._replace(detail="incompressible")
    assert dict(ledger) == {compressed: Amount(500, 5), incompressible: Amount(4096, 1)}
    assert examples.found == {compressed: [1, 2, 3], incompressible: [6]}
    assert added.unlisted == [7]
    assert not added.references
    assert not ledger.may_miss("zswap")


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_entries_on_cgroup_v1_hold_a_reference_only(lab: Lab, kernel: str) -> None:
    image, ledger = image_of(lab.image(kernel).program()), Ledger()
    reader = entries_of(image, [ZswapEntry(1, 100, 0, CHARGED)])
    reader.coverage.miss("an entry", 2, "not in the image")
    add_zswap(ledger, reader, {}, None, False)
    assert dict(ledger) == {Entry(CHARGED, "zswap", "compressed", 1): Amount(0, 1)}
    assert ledger.may_miss("zswap")


@pytest.mark.image
@pytest.mark.newest_kernel
@pytest.mark.parametrize("kernel", DEBIAN_KERNELS[-1:])
def test_an_entry_that_two_obj_cgroups_pay_for(lab: Lab, kernel: str) -> None:
    """It is one charge to the first of them; the second one is referred to as well."""
    image, ledger = image_of(lab.image(kernel).program()), Ledger()
    objcgs = {
        at: Objcg(at, 0x10, nid, False, 0, siblings=(0x1000, 0x1001))
        for nid, at in enumerate((0x1000, 0x1001))
    }

    class OnTwo(Reader):
        def nodes(self, entry: ZswapEntry) -> dict[int, int]:
            return {0: entry.length - entry.beyond, 1: entry.beyond} if entry.length else {}

    found = [
        ZswapEntry(1, 100, 0, 0x1000, beyond=30, beyond_nid=1),
        ZswapEntry(2, 0, 0, 0x1000),  # its data is on no node that is known
    ]
    reader, splitter = cast("ZswapReader", OnTwo(image, found)), PerNode(objcgs, True)
    added = add_zswap(ledger, reader, objcgs, splitter, True)
    first = Entry(0x1000, "zswap", "compressed", 0)
    assert dict(ledger) == {
        first: Amount(70, 1),
        first._replace(payer=0x1001, nid=1): Amount(30, 0),
        first._replace(nid=NUMA_NO_NODE): Amount(0, 1),
    }
    assert added.references == {0x1001: 1}
