# SPDX-License-Identifier: LGPL-2.1-or-later
"""What identities found, by counter."""

from __future__ import annotations

import pytest
from support.made import A, features, snapshot

from memcg_inspect.checks.found import FoundAmounts


@pytest.mark.parametrize(
    "item", ["MEMCG_PERCPU_B", "NR_KERNEL_STACK_KB", "NR_PAGETABLE", "MEMCG_SOCK", "MEMCG_KMEM"]
)
def test_counters_that_a_kernel_does_not_keep(item: str) -> None:
    """Nothing is known of them, which is not that nothing was found."""
    assert FoundAmounts(snapshot(features=features())).own(A, item) is None
    assert FoundAmounts(snapshot(features=features(item))).own(A, item) == 0
