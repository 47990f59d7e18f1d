# SPDX-License-Identifier: LGPL-2.1-or-later
"""Charges added up by kind."""

from __future__ import annotations

from support.made import OBJCG_A, OBJCG_B, A, ledger, snapshot

from memcg_inspect.checks.skew import charged, skew_matrix
from memcg_inspect.model import Objcg
from memcg_inspect.report import Charged, Skew


def test_charges_by_kind() -> None:
    some = ledger(
        {
            (OBJCG_A, "slab", "reclaimable", 0): (200, 2),
            (OBJCG_B, "slab", "unreclaimable", 1): (64, 1),
            (OBJCG_A, "percpu", "data", 0): (4096, 1),
        }
    )
    assert charged(snapshot(charges=some)) == (Charged("percpu", 4096, 1), Charged("slab", 264, 3))
    assert charged(snapshot()) == ()


def test_obj_cgroups_without_a_node_come_first() -> None:
    objcgs = {a: Objcg(a, A, nid, False, 0) for a, nid in ((0xA1, 0), (0xA2, None))}
    some = ledger({(0xA1, "slab", "", 0): (8, 1), (0xA2, "slab", "", 1): (16, 1)})
    assert skew_matrix(snapshot(objcgs=objcgs, charges=some)) == [
        Skew(A, "slab", None, 1, 16, 1),
        Skew(A, "slab", 0, 0, 8, 1),
    ]
