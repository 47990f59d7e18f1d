# SPDX-License-Identifier: LGPL-2.1-or-later
"""Charges added up by kind."""

from __future__ import annotations

from support.made import OBJCG_A, OBJCG_B, ledger, snapshot

from memcg_inspect.checks.skew import charged
from memcg_inspect.report import Charged


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
