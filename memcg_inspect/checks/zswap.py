# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Identity ``zswap``
------------------

For each memcg: ``MEMCG_ZSWAP_B`` is the compressed length of its entries, ``MEMCG_ZSWAPPED``
their number, and ``MEMCG_ZSWAP_INCOMP`` (7.2) the number of those that did not compress.
"""

from __future__ import annotations

from collections.abc import Callable

from memcg_inspect.checks.ledger import Amount
from memcg_inspect.checks.rows import make_row
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Row, Unit

__all__ = ("zswap_rows",)


def zswap_rows(snapshot: Snapshot) -> list[Row]:
    """Hold zswap entries against their counters, by memcg."""
    entries = snapshot.by_memcg("zswap")
    whole = snapshot.by_memcg("zswap", "incompressible")
    missing = snapshot.why_missing("zswap")
    rows = []
    sums: list[tuple[str, Unit, Callable[[int], int]]] = [
        ("MEMCG_ZSWAP_B", "bytes", lambda m: _of(entries, m).bytes),
        ("MEMCG_ZSWAPPED", "pages", lambda m: _of(entries, m).charges),
        ("MEMCG_ZSWAP_INCOMP", "pages", lambda m: _of(whole, m).charges),
    ]
    for item, unit, value in sums:
        if item not in snapshot.features.items:
            continue
        rows += [
            make_row(
                "zswap",
                memcg=memcg.address,
                nid=None,
                item=item,
                unit=unit,
                found={"zswap": value(memcg.address)},
                claimed=snapshot.own(memcg.address, item),
                missing=missing,
                unread=snapshot.unread(memcg.address),
                hierarchy=snapshot.folded(memcg.address, item),
            )
            for memcg in snapshot.live()
        ]
    return rows


def _of(amounts: object, memcg: int) -> Amount:
    return amounts[memcg]  # type: ignore[index,no-any-return]
