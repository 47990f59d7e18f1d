# SPDX-License-Identifier: LGPL-2.1-or-later
"""
References of a page that is being stored in zswap
--------------------------------------------------

``zswap_store()`` takes a reference to the obj_cgroup of the folio, and drops it when all pages are
stored. Since 6.13, ``zswap_store_page()`` takes one more for each entry. An entry that is on no LRU
list yet is not in the ledger, so its reference was not found either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memcg_inspect.checks.check import Explained
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running, counted
from memcg_inspect.report import Row

__all__ = ("being_stored",)

#: Up to 6.8, frontswap calls zswap_frontswap_store().
_STORES = re.compile(r"zswap_(frontswap_)?store")


def being_stored(snapshot: Snapshot, row: Row) -> Explained | None:
    """Return which tasks that store pages in zswap explain references that were not found."""
    off = row.off
    if off <= 0 or row.objcg is None:
        return None
    # Another task may have an old pointer to an entry: each holds one reference.
    left = set(snapshot.unlisted_zswap)
    stores = [store for cpu in snapshot.running for store in _stores(cpu, row.objcg, left)]
    if off > sum(most for most, _ in stores):
        return None
    return Explained("in-flight", "; ".join(reason for _, reason in stores))


def _stores(cpu: Running, objcg: int, left: set[int]) -> Iterator[tuple[int, str]]:
    """
    Return the most references that a task holds while it stores a page, and why.

    :param left: entries that are being stored; those that the task points to are taken away
    """
    function = next(filter(_STORES.match, cpu.functions), None)
    held = cpu.held or ()
    if function is None or not any(h.kind == "objcg" and h.address == objcg for h in held):
        return
    unlisted = {h.address for h in held if h.kind == "zswap"} & left
    left -= unlisted
    most = 1 + len(unlisted)
    where = f"{cpu.comm} ({cpu.pid})" if cpu.waiting else f"CPU {cpu.cpu} ({cpu.comm}, {cpu.pid})"
    entries = "".join(f", with zswap entry {address:#x}" for address in sorted(unlisted))
    yield most, f"at most {counted(most, 'references')} of {where}, in {function}{entries}"
