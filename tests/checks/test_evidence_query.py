# SPDX-License-Identifier: LGPL-2.1-or-later
"""Charges that may be the cause of a difference, and those that the report lists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memcg_inspect.checks.evidence_query import MOST_EVIDENCE, Candidates, EvidenceQuery, Rank
from memcg_inspect.report import Evidence

#: 600 bytes of reclaimable objects on node 1, charged to an obj_cgroup.
QUERY = EvidenceQuery("slab", frozenset({0xA0}), "reclaimable", 1, 600)
ANY = EvidenceQuery("slab", frozenset({0xA0}))


@pytest.mark.parametrize(
    ("size", "detail", "nid", "fits"),
    [
        (600, "reclaimable", 1, True),
        # three charges of 200 bytes
        (200, "reclaimable", 1, True),
        (1, "reclaimable", 1, True),
        # no number of these makes 600
        (400, "reclaimable", 1, False),
        (1200, "reclaimable", 1, False),
        (601, "reclaimable", 1, False),
        # one of the two is not enough
        (600, "unreclaimable", 1, False),
        (600, "reclaimable", 0, False),
        (400, "unreclaimable", 0, False),
        # a charge without a node, or of a kind that has no parts
        (600, "reclaimable", None, True),
        (600, None, 1, True),
        (600, None, 2, False),
        (400, None, None, False),
        # a size that can only be a damaged one
        (0, "reclaimable", 1, False),
        (-600, "reclaimable", 1, False),
    ],
)
def test_a_charge_fits_in_size_part_and_node(
    size: int, detail: str | None, nid: int | None, fits: bool
) -> None:
    assert QUERY.fits(size, detail, nid) == fits


def test_everything_fits_where_only_the_payer_matters() -> None:
    assert ANY.fits(72, "unreclaimable", 3)
    assert ANY.fits(4096)
    assert not ANY.fits(0)


def test_a_charge_that_explains_the_amount_comes_before_neighbours() -> None:
    """One object of 4,104 bytes is likelier than 57 of 72, whatever is in their slabs."""
    query = QUERY._replace(amount=4104, neighbours=frozenset({0xB0, 0xB1}))
    ranks = [
        query.in_slab({0xA0: 1, 0xB0: 2, 0xB1: 1}, 4104),
        query.in_slab({0xA0: 1, 0xB0: 2}, 4104),
        query.in_slab({0xA0: 1, 0xC0: 2}, 4104),
        query.in_slab({0xA0: 3, 0xC0: 2}, 4104),
        query.in_slab({0xA0: 1, 0xB0: 2}, 72),
        query.in_slab({0xA0: 2, 0xB0: 2}, 72),
        query.in_slab({0xA0: 1, 0xB0: 1}, 72),
        query.in_slab({0xA0: 1, 0xC0: 1}, 72),
        query.in_slab({0xA0: 1}, 72),
    ]
    assert [rank for rank, _ in ranks] == [
        Rank(True, 3, True),
        Rank(True, 2, True),
        Rank(True, 0, True),
        Rank(True, 0, False),
        Rank(False, 2, True),
        Rank(False, 2, False),
        Rank(False, 1, True),
        Rank(False, 0, True),
        # It is not among objects of others.
        Rank(False, 0, False),
    ]
    assert ranks == sorted(ranks, key=lambda pair: pair[0], reverse=True)
    assert [number for _, number in ranks] == [1, 1, 1, 3, 1, 2, 1, 1, 1]


def test_objects_of_all_payers_in_a_slab_count() -> None:
    query = QUERY._replace(payers=frozenset({0xA0, 0xA1}))
    assert query.in_slab({0xA0: 1, 0xA1: 1, 0xC0: 5}, 600) == (Rank(True, 0, False), 2)
    assert query.in_slab({0xA1: 1, 0xC0: 5}, 600) == (Rank(True, 0, True), 1)


@pytest.mark.parametrize(
    ("size", "fits", "explains"),
    [
        (2056, True, True),
        # 4096 * 2 + 2056
        (10248, True, True),
        # several of them: 257 * 8
        (8, True, False),
        (1028, True, False),
        (2040, False, False),
        (4096, False, False),
        (4112, False, False),
    ],
)
def test_an_amount_that_is_known_modulo_a_page(size: int, fits: bool, explains: bool) -> None:
    query = EvidenceQuery("slab", frozenset({0xA0}), amount=2056, modulo=4096)
    assert (query.fits(size), query.explains(size)) == (fits, explains)
    assert query.explains(0) is False


def charges(*addresses: int) -> list[Evidence]:
    return [Evidence(address, "slab") for address in addresses]


def shown(candidates: Candidates) -> list[tuple[int, int | None]]:
    return [(charge.address, charge.rank) for charge in candidates.listed]


LIKELY, LESS, LEAST = Rank(True, 2), Rank(True, 1), Rank(False, 9, True)


def test_the_likeliest_are_listed_and_all_are_counted() -> None:
    candidates = Candidates()
    assert (candidates.total, candidates.tied, candidates.listed) == (0, 0, ())
    for number in range(6):
        candidates.add(LEAST, charges(0x300 + number))
        candidates.add(LIKELY, charges(0x100 + number))
        candidates.add(LESS, charges(0x200 + number))
    # Equal ones stay in the order in which they came.
    assert shown(candidates) == [
        *((0x100 + number, 1) for number in range(6)),
        *((0x200 + number, 7) for number in range(4)),
    ]
    assert len(candidates.listed) == MOST_EVIDENCE == 10
    assert (candidates.total, candidates.tied) == (18, 2)


def test_of_thousands_that_are_equally_likely_few_are_read() -> None:
    read = []

    def some() -> Iterator[Evidence]:
        for number in range(5000):
            read.append(number)
            yield Evidence(number, "slab")

    candidates = Candidates()
    candidates.add(LESS, some(), 5000)
    assert read == list(range(MOST_EVIDENCE))
    assert (candidates.total, candidates.tied) == (5000, 4990)
    assert {rank for _, rank in shown(candidates)} == {1}
    # Neither those that are as likely nor those that are less so are read at all.
    candidates.add(LESS, some(), 7)
    candidates.add(LEAST, some(), 7)
    assert len(read) == MOST_EVIDENCE
    assert (candidates.total, candidates.tied) == (5014, 4997)
    candidates.add(LIKELY, charges(0x100))
    assert shown(candidates)[:2] == [(0x100, 1), (0, 2)]
    assert (candidates.total, candidates.tied) == (5015, 4998)


def test_ties_are_with_the_last_one_that_is_listed() -> None:
    candidates = Candidates()
    candidates.add(LIKELY, charges(*range(9)), 9)
    candidates.add(LESS, charges(0x20, 0x21, 0x22), 3)
    candidates.add(LEAST, charges(0x30), 7)
    assert (candidates.total, candidates.tied) == (19, 2)


#: A kind of charge, its bytes, and who pays: `struct obj_cgroup *`.
SIZE = ("slab", 72, 1)


def test_candidates_of_several_queries() -> None:
    one, other = Candidates(), Candidates()
    one.add(LESS, charges(1), 3)
    other.add(LIKELY, charges(2, 3), 2)
    other.add(LESS, charges(4))
    one.sizes[SIZE] = 2
    other.sizes[SIZE] = 3
    one.merge(other)
    assert one.sizes == {SIZE: 5}
    assert shown(one) == [(2, 1), (3, 1), (1, 3), (4, 3)]
    assert (one.total, one.tied) == (6, 2)
    assert (other.total, other.tied) == (3, 0)


def test_a_charge_that_is_likelier_than_the_last_one_takes_its_place() -> None:
    candidates = Candidates()
    candidates.add(LIKELY, charges(*range(9)), 9)
    candidates.add(LEAST, charges(0x30))
    candidates.add(LESS, charges(0x20))
    assert shown(candidates)[-1] == (0x20, 10)
    assert (candidates.total, candidates.tied) == (11, 0)
