# SPDX-License-Identifier: LGPL-2.1-or-later
"""What identities found, by counter."""

from __future__ import annotations

import pytest
from support.made import DEAD, OBJCG_A, RECLAIMABLE, ROOT, A, B, family, features, snapshot, zero
from support.made_charges import image

from memcg_inspect.checks.found import FoundAmounts
from memcg_inspect.checks.ledger import Ledger
from memcg_inspect.model import ObjStock, Stat
from memcg_inspect.tables import NotRead


@pytest.mark.parametrize(
    "item", ["MEMCG_PERCPU_B", "NR_KERNEL_STACK_KB", "NR_PAGETABLE", "MEMCG_SOCK", "MEMCG_KMEM"]
)
def test_counters_that_a_kernel_does_not_keep(item: str) -> None:
    """Nothing is known of them, which is not that nothing was found."""
    assert FoundAmounts(snapshot(features=features())).own(A, item) is None
    assert FoundAmounts(snapshot(features=features(item))).own(A, item) == 0


def test_user_pages_of_a_node_without_any() -> None:
    """A counter that is compared by node is known of each node, one of all nodes is not."""
    some = FoundAmounts(snapshot(features=features("NR_SHMEM", "NR_FILE_PAGES")))
    assert some.own(A, "NR_SHMEM", 1) == 0
    assert some.own(A, "NR_SHMEM") == 0
    assert some.own(A, "NR_FILE_PAGES") == 0
    assert some.own(A, "NR_FILE_PAGES", 1) is None


def test_user_pages_whose_counters_are_zero() -> None:
    """There is no row of them, but they are compared."""
    items = ("NR_SHMEM", "NR_FILE_PAGES")
    zero = dict.fromkeys((*items, RECLAIMABLE), Stat(0, 0, 0))
    memcgs = snapshot().memcgs
    some = FoundAmounts(
        snapshot(
            features=features(*items),
            memcg_stats=dict.fromkeys(memcgs, zero),
            lruvec_stats={(memcg, nid): zero for memcg in memcgs for nid in (0, 1)},
        )
    )
    assert [some.own(A, "NR_SHMEM", nid) for nid in (None, 0, 1)] == [0, 0, 0]
    assert [some.own(A, "NR_FILE_PAGES", nid) for nid in (None, 1)] == [0, None]


def test_kernel_memory_of_a_memcg_and_of_those_below() -> None:
    """Of ``/a``, 24 pages and one of objects; of ``/a/b``, two of objects."""
    found = FoundAmounts(image())
    assert [found.own(memcg, "MEMCG_KMEM") for memcg in (A, B)] == [25, 2]
    assert [found.subtree(memcg, "MEMCG_KMEM") for memcg in (ROOT, A, B)] == [27, 27, 2]
    # What a removed memcg has is that of the one that pays for it.
    assert found.own(DEAD, "MEMCG_KMEM") is None
    # It is not kept by node; page tables are, and there is no more of them than on their node.
    assert found.own(A, "MEMCG_KMEM", 0) is None
    assert [found.own(A, "NR_PAGETABLE", nid) for nid in (0, 1, None)] == [0, 1, 1]
    # Page counters and reference counts are no counters of this kind.
    assert found.own(A, "memory.usage") is None
    assert found.own(A, "refcnt") is None


def test_slab_bytes_that_a_stock_holds_back_are_in_no_counter_yet() -> None:
    stocks = [ObjStock(0, 0, OBJCG_A, 0, 0, 64, 0, False)]
    counters = zero(family(), (0, 1))
    found = FoundAmounts(image(stocks=stocks, lruvec_stats=counters))
    assert found.own(A, RECLAIMABLE, 0) == 1000 - 64


def test_memory_that_could_not_be_read() -> None:
    charges = Ledger()
    charges.note_missing("kmem")
    amount = FoundAmounts(image(charges=charges)).own(A, "MEMCG_KMEM")
    assert isinstance(amount, NotRead)
    assert amount.reason not in ("", "not all memory could be read")
