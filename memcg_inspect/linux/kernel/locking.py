# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Spinlocks
---------

Mirrors ``spin_is_locked()`` of :linux:`kernel/locking/spinlock.c` and its headers.
"""

from __future__ import annotations

from drgn import Object

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member

__all__ = ("spin_is_locked",)


def spin_is_locked(image: Image, lock: Object) -> bool | None:
    """
    Return whether a spinlock is held.

    :param lock: ``spinlock_t``
    :return: ``None`` if it is neither a queued spinlock nor one of ``PREEMPT_RT``
    :raises drgn.FaultError: if it cannot be read
    """
    if has_member(image, "struct spinlock", "lock"):  # rt_mutex_base
        return bool(lock.lock.owner)
    # With CONFIG_SMP=n there is none.
    is_queued = has_member(image, "struct qspinlock", "val")
    if not is_queued or not has_member(image, "struct spinlock", "rlock"):
        return None
    return bool(lock.rlock.raw_lock.val.counter)
