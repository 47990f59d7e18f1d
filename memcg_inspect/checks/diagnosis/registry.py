# SPDX-License-Identifier: LGPL-2.1-or-later
"""All causes, the likelier ones first where several explain the same."""

from __future__ import annotations

from memcg_inspect.checks.diagnosis import charges, counters, hugetlb, objcgs, released, zones
from memcg_inspect.checks.diagnosis.cause import Cause

__all__ = ("CAUSES", "cause_of")

CAUSES: tuple[Cause, ...] = (
    *released.CAUSES,
    *objcgs.CAUSES,
    *charges.CAUSES,
    *counters.CAUSES,
    *zones.CAUSES,
    *hugetlb.CAUSES,
)

_BY_NAME = {cause.name: cause for cause in reversed(CAUSES)}


def cause_of(name: str) -> Cause:
    """Return the definition of a cause that is recognized from rows."""
    return _BY_NAME[name]
