# SPDX-License-Identifier: LGPL-2.1-or-later
"""The ledger: sums, and what is known to be missing from them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memcg_inspect.checks.ledger import Amount, Entry, Ledger


def test_adds_up_by_entry() -> None:
    ledger = Ledger()
    ledger.add(Entry(0xA0, "slab", "reclaimable", 0), 3 * 200, 3)
    ledger.add(Entry(0xA0, "slab", "reclaimable", 0), 2 * 104, 2)
    ledger.add(Entry(0xA0, "slab", "reclaimable", 1), 200, 1)
    ledger.add(Entry(0xA0, "slab", "unreclaimable", 0), 72, 1)
    ledger.add(Entry(0xB0, "slab", "reclaimable", 0), 8, 1)
    assert dict(ledger) == {
        Entry(0xA0, "slab", "reclaimable", 0): Amount(808, 5),
        Entry(0xA0, "slab", "reclaimable", 1): Amount(200, 1),
        Entry(0xA0, "slab", "unreclaimable", 0): Amount(72, 1),
        Entry(0xB0, "slab", "reclaimable", 0): Amount(8, 1),
    }
    assert len(ledger) == 4


def test_missing_charges_hide_what_matches() -> None:
    ledger = Ledger()
    ledger.note_missing("slab", "reclaimable", 2)
    assert ledger.may_miss("slab", "reclaimable", 2)
    # a question about any detail or node includes this one
    assert ledger.may_miss("slab", None, 2)
    assert ledger.may_miss("slab", "reclaimable")
    assert ledger.may_miss("slab")
    assert not ledger.may_miss("slab", "unreclaimable", 2)
    assert not ledger.may_miss("slab", "reclaimable", 1)
    assert not ledger.may_miss("kmem")


def test_missing_charges_of_unknown_detail_or_node_hide_any() -> None:
    ledger = Ledger()
    ledger.note_missing("slab", None, 0)
    assert ledger.may_miss("slab", "reclaimable", 0)
    assert ledger.may_miss("slab", "unreclaimable", 0)
    assert not ledger.may_miss("slab", "unreclaimable", 1)
    ledger.note_missing("kmem")
    assert ledger.may_miss("kmem", "large_kmalloc", 7)
    assert not ledger.may_miss("percpu")


def test_missing_pages_hide_all_kinds_that_pages_can_be() -> None:
    """Sockets are not looked for by node."""
    ledger = Ledger()
    ledger.note_missing_pages(2)
    kinds = ("slab", "kmem", "lru")
    assert ledger.missing == {(kind, None, 2) for kind in kinds} | {("sock", None, None)}
    ledger.note_missing_pages()
    assert ledger.may_miss("lru", None, 1)
    assert not ledger.may_miss("percpu")


def test_new_ledger_misses_nothing() -> None:
    assert not Ledger().may_miss("slab")
    assert len(Ledger()) == 0


entries = st.builds(
    Entry,
    st.integers(0, 3),
    st.sampled_from(["slab", "kmem"]),
    st.sampled_from(["reclaimable", "other"]),
    st.integers(0, 2),
)


@given(st.lists(st.tuples(entries, st.integers(0, 10**12), st.integers(0, 10**6))))
def test_order_of_charges_does_not_matter(
    charges: list[tuple[Entry, int, int]],
) -> None:
    forward, backward = Ledger(), Ledger()
    for charge in charges:
        forward.add(*charge)
    for charge in reversed(charges):
        backward.add(*charge)
    assert dict(forward) == dict(backward)
    assert sum(amount.bytes for _, amount in forward) == sum(size for _, size, _ in charges)
    assert sum(amount.charges for _, amount in forward) == sum(count for *_, count in charges)
