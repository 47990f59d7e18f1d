# SPDX-License-Identifier: LGPL-2.1-or-later
"""What is read of all nodes together, and what may be missing of it."""

from __future__ import annotations

from typing import Any

import pytest
from drgn import FaultError

from memcg_inspect.collect import nodes
from memcg_inspect.collect.nodes import read_nodes
from memcg_inspect.model import Coverage, Nodes

IMAGE: Any = None


def missing(*_: object) -> Any:
    """Take the place of a reader that meets memory that is not in the image."""
    raise FaultError("not in the image", 0x1230)


@pytest.fixture(autouse=True)
def readers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {
        "nr_vmalloc_pages": 7,
        "counts_writeback": False,
        "memory_nodes": frozenset({0, 1}),
        "online_nodes": (0, 1, 2),
        "steady_nodes": frozenset({0, 1, 3}),
        "has_restored_areas": True,
    }
    for name, value in found.items():
        monkeypatch.setattr(nodes, name, lambda _, value=value: value)
    monkeypatch.setattr(nodes, "read_total_stats", lambda *_: {"NR_FILE_PAGES": 5})


def test_all_is_there() -> None:
    """A node is unsteady if it is online, and may have had no memory for a time."""
    coverage = Coverage()
    assert read_nodes(IMAGE, coverage) == Nodes(
        totals={"NR_FILE_PAGES": 5},
        with_memory=frozenset({0, 1}),
        unsteady=frozenset({2}),
        vmalloc_pages=7,
        vmalloc_restored=True,
        writeback_by_nfs=False,
    )
    assert coverage.unreadable == 0


def test_the_counter_of_vmalloc_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = Coverage()
    monkeypatch.setattr(nodes, "nr_vmalloc_pages", missing)
    assert read_nodes(IMAGE, coverage).vmalloc_pages is None
    (missed,) = coverage.examples
    assert (missed.what, missed.address) == ("nr_vmalloc_pages", 0x1230)
    assert "not in the image" in missed.reason


def test_the_list_of_modules_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may be one of the modules then."""
    coverage = Coverage()
    monkeypatch.setattr(nodes, "counts_writeback", missing)
    assert read_nodes(IMAGE, coverage).writeback_by_nfs is True
    (missed,) = coverage.examples
    assert (missed.what, missed.address) == ("list of modules", 0x1230)
