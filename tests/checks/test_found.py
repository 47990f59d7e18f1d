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


def test_user_pages_of_a_node_without_any() -> None:
    """A counter that is compared by node is known of each node, one of all nodes is not."""
    some = FoundAmounts(snapshot(features=features("NR_SHMEM", "NR_FILE_PAGES")))
    assert some.own(A, "NR_SHMEM", 1) == 0
    assert some.own(A, "NR_SHMEM") == 0
    assert some.own(A, "NR_FILE_PAGES") == 0
    assert some.own(A, "NR_FILE_PAGES", 1) is None
