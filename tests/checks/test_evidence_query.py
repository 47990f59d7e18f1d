# SPDX-License-Identifier: LGPL-2.1-or-later
"""Charges that may be the cause of a difference, and those that the report lists."""

from __future__ import annotations

import pytest

from memcg_inspect.checks.evidence_query import MOST_EVIDENCE, EvidenceQuery, most_likely

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


def test_charges_among_neighbours_come_first() -> None:
    ranks = [
        QUERY.rank(600, neighbours=3),
        QUERY.rank(200, neighbours=3),
        QUERY.rank(600, neighbours=2),
        QUERY.rank(200, neighbours=2),
        QUERY.rank(600),
        QUERY.rank(200),
    ]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == len(ranks)


def test_the_likeliest_are_kept_and_equal_ones_stay_in_order() -> None:
    ranked = [(rank, f"{rank}{letter}") for letter in "abcdef" for rank in (0, 2, 1)]
    best = [evidence for _, evidence in most_likely(ranked)]
    assert len(best) == MOST_EVIDENCE
    assert best == ["2a", "2b", "2c", "2d", "2e", "2f", "1a", "1b", "1c", "1d"]
    assert most_likely(ranked[:2]) == [(2, "2a"), (0, "0a")]
