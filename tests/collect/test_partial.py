# SPDX-License-Identifier: LGPL-2.1-or-later
"""Merging the results of ranges of page frames leaves out no field; what is told of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from memcg_inspect.checks.ledger import Amount, Entry
from memcg_inspect.checks.profile import Use
from memcg_inspect.checks.sockets import SockRemainder, SockUsage, UnknownSock
from memcg_inspect.collect.partial import Partial, merged
from memcg_inspect.collect.slab_tally import SlabSum, SlabTally
from memcg_inspect.linux.mm.slab import SlabCache
from memcg_inspect.model import Unreadable, Vectors
from memcg_inspect.model_freeing import Transient

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


def test_objects_that_are_being_freed_are_in_the_order_of_their_addresses() -> None:
    made = Partial()
    first, second = Transient("a map", 0x10), Transient("a map", 0x20, 3)
    made.transients = {(7, second), (7, first), (0, second)}
    assert made.transients_by_objcg() == {7: [first, second], 0: [second]}


def test_sockets_of_a_memcg() -> None:
    made = Partial()
    made.sockets = Counter({1: 5, 2: 4})
    one, two = SockRemainder(0x10, "TCP", 100), SockRemainder(0x20, "UDP", -3)
    why, other = UnknownSock("a reason", True, False), UnknownSock("another", False, True)
    made.sock_remainders = {(1, two), (1, one), (2, two)}
    made.unknown_socks = {(2, other), (2, why)}
    assert made.sockets_by_memcg() == {
        1: SockUsage(5, (one, two)),
        2: SockUsage(4, (two,), (why, other)),
    }


def test_vectors_of_the_slabs_of_a_node() -> None:
    """Vectors in memory that is not of kmalloc() are in the order of their slabs."""
    made = Partial()
    made.vectors, made.vectors_elsewhere = Counter({0: 9, 1: 2}), Counter({0: 4})
    made.vectors_dangling = {(0, 0x500, 1, 0x90), (0, 0x700, 0, 0x80), (1, 0x600, 1, 0x70)}
    assert made.vectors_by_node() == {
        0: Vectors(9, 4, ((0x700, 0, 0x80), (0x500, 1, 0x90))),
        1: Vectors(2, 0, ((0x600, 1, 0x70),)),
    }


def test_references_to_a_call_site_add_up() -> None:
    made, use = Partial(), Use(0x10, "slab", 7, 1)
    made.use(use, 64, 1)
    made.use(use, 32, 2)
    made.use(use._replace(nid=0), 8, 1)
    assert made.uses == {use: Amount(96, 3), use._replace(nid=0): Amount(8, 1)}
