# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Spinlocks
---------

Mirrors ``spin_is_locked()`` of :linux:`kernel/locking/spinlock.c` and its headers.
"""

from __future__ import annotations

from drgn import Object, TypeKind

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member

__all__ = ("spin_is_locked",)


def spin_is_locked(image: Image, lock: Object) -> bool | None:
    """
    Return whether a spinlock is held.

    :param lock: ``spinlock_t``
    :return: ``None`` if it is of no known sort
    :raises drgn.FaultError: if it cannot be read
    """
    if has_member(image, "struct spinlock", "lock"):  # rt_mutex_base
        return bool(lock.lock.owner)
    if not has_member(image, "struct spinlock", "rlock"):
        return None
    lock = lock.rlock.raw_lock
    if has_member(image, "struct qspinlock", "val"):
        # An atomic_t, but on powerpc an integer since commit 9f61521c7a28 ("powerpc/qspinlock:
        # powerpc qspinlock implementation") (in v6.2).
        is_integer = lock.val.type_.unaliased().kind == TypeKind.INT
        return bool(lock.val if is_integer else lock.val.counter)
    if has_member(image, "arch_spinlock_t", "lock"):  # s390
        return bool(lock.lock)
    return None  # CONFIG_SMP=n
