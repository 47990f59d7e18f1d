# SPDX-License-Identifier: LGPL-2.1-or-later
"""The charges of an image: by kind, and by charged node and backing node."""

from __future__ import annotations

from memcg_inspect.checks.ledger import Amount
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import NUMA_NO_NODE
from memcg_inspect.report import Charged, Skew

__all__ = ("charged", "skew_matrix")


def charged(snapshot: Snapshot) -> tuple[Charged, ...]:
    """Return all charges of the ledger, added up by kind."""
    kinds: dict[str, Amount] = {}
    for entry, amount in snapshot.ledger:
        kinds[entry.kind] = kinds.get(entry.kind, Amount(0, 0)).plus(amount)
    return tuple(Charged(kind, *kinds[kind]) for kind in sorted(kinds))


#: Memcg, kind, charged node and backing node.
_Cell = tuple[int, str, int | None, int]


def skew_matrix(snapshot: Snapshot) -> list[Skew]:
    """
    Return the ledger added up by memcg, kind, charged node and backing node.

    The charged node is that of the obj_cgroup that pays. On kernels with one obj_cgroup for all
    nodes it is ``None``. Charges without a node, and those whose node could not be read, are left
    out.
    """
    cells: dict[_Cell, Amount] = {}
    for entry, amount in snapshot.ledger:
        payer = snapshot.payer(entry.payer)
        objcg = snapshot.objcgs.get(entry.payer)
        if payer is None or entry.nid == NUMA_NO_NODE:
            continue
        key = (payer, entry.kind, objcg.nid if objcg is not None else None, entry.nid)
        before = cells.get(key, Amount(0, 0))
        cells[key] = Amount(before.bytes + amount.bytes, before.charges + amount.charges)
    position = {memcg: number for number, memcg in enumerate(snapshot.memcgs)}

    def place(cell: tuple[_Cell, Amount]) -> tuple[int, str, int, int]:
        (memcg, kind, charged, backing), _ = cell
        return position[memcg], kind, NUMA_NO_NODE if charged is None else charged, backing

    return [
        Skew(memcg, kind, charged, backing, amount.bytes, amount.charges)
        for (memcg, kind, charged, backing), amount in sorted(cells.items(), key=place)
    ]
