# SPDX-License-Identifier: LGPL-2.1-or-later
"""
References of a folio that is being split
-----------------------------------------

A folio holds one reference to who pays for it, and its parts one each. ``folio_split_memcg_refs()``
(``split_page_memcg()`` in 6.1 and 6.12) takes those of the parts at once, 511 for a huge page of
512 pages. Then the parts become folios, one after the other. Interrupts are off meanwhile: a task
that does this is running. Its stack or registers point to the folio, which has its old order until
the last part is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memcg_inspect.checks.check import Explained
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running, counted
from memcg_inspect.report import Row

__all__ = ("being_split",)

#: Functions that split folios; split_huge_pmd() splits the mapping only.
_SPLITS = re.compile(
    r"_*(split_huge_page|split_folio|split_page_memcg|folio_split|split_unmapped_folio"
    r"|folio_freeze_and_split)"
)


def being_split(snapshot: Snapshot, row: Row) -> Explained | None:
    """Return which folios that CPUs are splitting explain references that were not found."""
    off = row.off
    if off <= 0:
        return None
    splits = [split for cpu in snapshot.running for split in _splits(snapshot, cpu, row)]
    if off > sum(most for most, _ in splits):
        return None
    return Explained("in-flight", "; ".join(reason for _, reason in splits))


def _splits(snapshot: Snapshot, cpu: Running, row: Row) -> Iterator[tuple[int, str]]:
    """Return the most references that a CPU takes for the folio that it splits, and why."""
    function = next(filter(_SPLITS.match, cpu.functions), None)
    if function is None or cpu.waiting:
        return
    payer = row.memcg if row.objcg is None else row.objcg
    folios = [h for h in cpu.held or () if h.kind == "folio" and h.payer == payer]
    # One folio at a time.
    folio = max(folios, key=lambda held: held.bytes, default=None)
    if folio is None:
        return
    most = folio.bytes // snapshot.image.page_size - 1
    if most:
        yield (
            most,
            f"at most {counted(most, 'references')} for the parts of folio {folio.address:#x}, "
            f"which CPU {cpu.cpu} ({cpu.comm}, {cpu.pid}) splits in {function}",
        )
