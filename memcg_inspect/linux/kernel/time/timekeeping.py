# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The time of a machine
---------------------

Mirrors ``struct timekeeper`` of :linux:`kernel/time/timekeeping.c`, of the system's clocks. Where
it is:

- up to 6.12, ``tk_core`` has no named type. ``shadow_timekeeper``, which each update writes first
  (``timekeeping_advance()``), is as new;
- since commit "timekeeping: Move shadow_timekeeper into tk_core" (in v6.13), ``tk_core`` has both;
- since there are auxiliary timekeepers (in v6.17), ``tk_core`` is the first element of
  ``timekeeper_data``.

Between the last two, BTF has no type of ``tk_core``, so the time is known with debug info only.
"""

from __future__ import annotations

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model_snapshot import ImageTime

__all__ = ("read_time",)

#: Year 2500, in seconds since 1970.
_LATEST = 530 * 365 * 24 * 60 * 60


def read_time(image: Image) -> ImageTime | None:
    """
    Read the clocks of the image, to the second.

    :return: ``None`` if the kernel's types do not tell where they are, or if they are unreadable
    """
    for find in (_aux_clocks, _core, _shadow):
        try:
            timekeeper = find(image)
            found = ImageTime(timekeeper.xtime_sec.value_(), timekeeper.ktime_sec.value_())
        except (UnknownKernelError, LookupError, AttributeError, TypeError, FaultError):
            continue
        if 0 <= found.uptime <= found.realtime <= _LATEST:
            return found
    return None


def _aux_clocks(image: Image) -> Object:
    return image.object("timekeeper_data")[0].timekeeper


def _core(image: Image) -> Object:
    return image.object("tk_core").timekeeper


def _shadow(image: Image) -> Object:
    return image.object("shadow_timekeeper")
