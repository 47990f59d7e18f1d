# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The time of a machine
---------------------

Mirrors ``struct timekeeper`` of :linux:`kernel/time/timekeeping.c`, of the system's clocks. Where
it is:

- up to 6.12, ``tk_core`` has no named type. ``shadow_timekeeper``, which each update writes first
  (``timekeeping_advance()``), is as new;
- since commit "timekeeping: Move shadow_timekeeper into tk_core" (in v6.13), ``tk_core`` has both.
  Its type has a name since commit 10f7c178a9da ("timekeeping: Define a struct type for tk_core to
  make it reusable") (in v6.13);
- since there are auxiliary timekeepers (in v6.17), ``tk_core`` is the first element of
  ``timekeeper_data``.
"""

from __future__ import annotations

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.model_snapshot import ImageTime

__all__ = ("read_time",)

_SECOND = 10**9
#: Year 2500, in nanoseconds since 1970.
_LATEST = 530 * 365 * 24 * 60 * 60 * _SECOND
#: The most bits of a fraction of a nanosecond.
_MOST_SHIFT = 32


def read_time(image: Image) -> ImageTime | None:
    """
    Read the clocks of the image, as of the last tick.

    Mirrors ``tk_xtime()`` and ``ktime_get_boottime()``, without the cycles since the last update.

    :return: ``None`` if the kernel's types do not tell where they are, or if they are unreadable
    """
    for find in (_aux_clocks, _core, _shadow):
        try:
            tk = find(image).read_()
            shift = tk.tkr_mono.shift.value_()
            if shift > _MOST_SHIFT:
                continue
            second = tk.tkr_mono.xtime_nsec.value_() >> shift
            realtime = tk.xtime_sec.value_() * _SECOND + second
            monotonic = realtime + _nanoseconds(tk.wall_to_monotonic)
            found = ImageTime(realtime, monotonic + tk.offs_boot.value_())
        except (UnknownKernelError, LookupError, AttributeError, TypeError, FaultError):
            continue
        if 0 <= found.boottime <= found.realtime <= _LATEST:
            return found
    return None


def _nanoseconds(time: Object) -> int:
    """Return a ``struct timespec64`` in nanoseconds."""
    return int(time.tv_sec.value_() * _SECOND + time.tv_nsec.value_())


def _aux_clocks(image: Image) -> Object:
    return image.object("timekeeper_data")[0].timekeeper


def _core(image: Image) -> Object:
    return image.object("tk_core").timekeeper


def _shadow(image: Image) -> Object:
    return image.object("shadow_timekeeper")
