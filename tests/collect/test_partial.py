# SPDX-License-Identifier: LGPL-2.1-or-later
"""Merging the results of ranges of page frames leaves out no field."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from memcg_inspect.checks.ledger import Amount, Entry
from memcg_inspect.checks.profile import Use
from memcg_inspect.collect.partial import Partial, merged
from memcg_inspect.collect.slab_tally import SlabSum, SlabTally
from memcg_inspect.linux.mm.slab import SlabCache
from memcg_inspect.model import Unreadable

DENTRY = SlabCache(0x1000, "dentry", 192, 192, 0, True, 200)
FIELDS = [field.name for field in fields(Partial) if field.name != "start"]


def filled(number: int) -> Partial:
    """Return a range that has something in every field. Other numbers have other keys."""
    made = Partial(number)
    made.ledger.add(Entry(number, "slab", "reclaimable", 0), 64, 1)
    made.coverage["slab"].read = 3
    made.coverage["slab"].miss("slab", number, "a reason")
    made.slabs = SlabTally({(0, number, False): SlabSum(DENTRY, 1, 2, 42, 40, 39)})
    made.uses = {Use(number, "slab", 0, 0): Amount(8, 1)}
    made.compound = {number: (Entry(number, "kmem", "", 0), 8192)}
    made.unplaced = {number: (Entry(number, "kmem", "other", 0), 4096)}
    made.unnamed = {number: "a reason"}
    for name in FIELDS:
        value = getattr(made, name)
        if isinstance(value, Counter):
            value[number] = 5
        elif isinstance(value, set):
            value.add((number, number))
    return made


def test_every_field_is_tried() -> None:
    empty, made = Partial(), filled(1)
    assert [name for name in FIELDS if getattr(made, name) == getattr(empty, name)] == []


@pytest.mark.parametrize("name", FIELDS)
def test_merging_into_nothing_leaves_nothing_out(name: str) -> None:
    assert getattr(merged([Partial(), filled(1)]), name) == getattr(filled(1), name)


@pytest.mark.parametrize("name", FIELDS)
def test_merging_keeps_both(name: str) -> None:
    one, both = filled(1), merged([filled(2), filled(1)])
    assert getattr(both, name) != getattr(one, name)
    assert both.start == 1
    assert both.coverage["slab"].read == 6
    assert both.coverage["slab"].examples[:1] == [Unreadable("slab", 1, "a reason")]
    assert both.large_kmalloc == {1: 5, 2: 5}
    assert merged([filled(1), filled(1)]).large_kmalloc == {1: 10}
