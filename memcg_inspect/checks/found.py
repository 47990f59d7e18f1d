# SPDX-License-Identifier: LGPL-2.1-or-later
"""
What was found for a counter
----------------------------

For each counter of memcgs that some identity compares with memory: what the identity found. So a
view can show it beside the counter.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from memcg_inspect.checks.check import Check
from memcg_inspect.checks.identities import user_pages
from memcg_inspect.checks.registry import CHECKS
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.tables import NotRead

__all__ = ("FoundAmounts",)

#: Identities that leave out rows in which both sides are 0.
_SPARSE = frozenset(user_pages.ITEMS)


class FoundAmounts:
    """
    What identities found, by memcg, node and counter.

    What object stocks hold was found, but no counter has it yet. It is subtracted.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._nodes = snapshot.image.nodes
        self._amounts: dict[tuple[int, int | None, str], int | NotRead] = {}
        self._by_node: set[str] = set()
        self._items: set[str] = set()
        for check in CHECKS:
            if _compares(check) and check.why_not_kept(snapshot) is None:
                self._add(check)
        # The identity has no row of a counter that is 0. On a kernel without it, none is kept.
        kept = user_pages.kept_items(snapshot)
        self._items.update(kept)
        self._by_node.update(item for item in kept if user_pages.has_nodes(snapshot, item))

    def _add(self, check: Check) -> None:
        for row in check.rows(self._snapshot):
            if row.memcg is None or row.item not in check.items:
                continue
            self._items.add(row.item)
            if row.nid is not None:
                self._by_node.add(row.item)
            amount = sum(row.found.values()) - (row.claimed or {}).get("stock", 0)
            is_missing = row.status == "unverifiable" and row.claimed is not None
            self._amounts[row.memcg, row.nid, row.item] = (
                NotRead(row.reason or "not all memory could be read") if is_missing else amount
            )

    def own(self, memcg: int, item: str, nid: int | None = None) -> int | NotRead | None:
        """
        Return what was found of a live memcg, and of the removed ones below it that it pays for.

        :param nid: node; ``None`` for all of them
        :return: in the unit of the counter; ``None`` if no identity compares it
        """
        if item not in self._items or (nid is not None and item not in self._by_node):
            return None
        nids = self._nodes if nid is None and item in self._by_node else (nid,)
        return _sum([self._amount(memcg, at, item) for at in nids])

    def _amount(self, memcg: int, nid: int | None, item: str) -> int | NotRead | None:
        return self._amounts.get((memcg, nid, item), 0 if item in _SPARSE else None)

    def subtree(self, memcg: int, item: str, nid: int | None = None) -> int | NotRead | None:
        """Return what was found of a live memcg and of all below it."""
        return _sum([self.own(address, item, nid) for address in self._below[memcg]])

    @cached_property
    def _below(self) -> dict[int, list[int]]:
        below: defaultdict[int, list[int]] = defaultdict(list)
        for memcg in self._snapshot.live():
            for above in self._snapshot.ancestors(memcg.address):
                below[above].append(memcg.address)
        return below


def _compares(check: Check) -> bool:
    """Return whether an identity compares counters of memcgs with memory."""
    return bool(check.items) and check.derive is None and not check.counters_only


def _sum(parts: list[int | NotRead | None]) -> int | NotRead | None:
    total = 0
    for part in parts:
        if not isinstance(part, int):
            return part
        total += part
    return total
