# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Planters of faults: a module for each identity, see :mod:`support.planting`.

:func:`planters_of` finds the module by the name of the identity, so that nothing else lists them.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

from support.planting import Planter

__all__ = ("planters_of",)


@cache
def planters_of(identity: str) -> tuple[Planter, ...]:
    """Return the planters of an identity; none if nobody wrote them."""
    name = f"{__name__}.{identity}"
    if importlib.util.find_spec(name) is None:
        return ()
    planters: tuple[Planter, ...] = importlib.import_module(name).PLANTERS
    return planters
