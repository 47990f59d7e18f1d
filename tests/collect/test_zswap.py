# SPDX-License-Identifier: LGPL-2.1-or-later
"""Which entries of zswap are added to the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from support.guests import DEBIAN_KERNELS, Lab

from memcg_inspect.checks.ledger import Ledger
from memcg_inspect.collect.zswap import add_zswap
from memcg_inspect.image.image import Image, image_of
from memcg_inspect.linux.mm.zswap import ZswapEntry, ZswapReader
from memcg_inspect.model import Coverage, Objcg

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
