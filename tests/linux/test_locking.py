# SPDX-License-Identifier: LGPL-2.1-or-later
"""Spinlocks, as each configuration and architecture declares them."""

from __future__ import annotations

import pytest
from support.layouts import MadeImage
from support.made_memory import BASE, MadeMemory

from memcg_inspect.linux.kernel.locking import spin_is_locked

AT = 0xFFFFFFFF82000000
RAW = "struct raw_spinlock { %s raw_lock; }; struct spinlock { struct raw_spinlock rlock; };"
#: Structures, and the words of a lock that is free and of locks that are held.
LOCKS = {
    "x86 and arm64": (
        "struct counter { int counter; }; struct qspinlock { struct counter val; };"
        + RAW % "struct qspinlock",
        0,
        (1, 0x100, 0x40001),
    ),
    "powerpc": (
        "struct qspinlock { unsigned int val; };" + RAW % "struct qspinlock",
        0,
        (1, 0x80000000),
    ),
    "PREEMPT_RT": (
        "struct rt_mutex_base { unsigned int wait_lock; void *owner; };"
        "struct spinlock { struct rt_mutex_base lock; };",
        5,  # the lock of its list of waiters
        (5 | 0xFFFF8880 << 64, 1 << 64),
    ),
}


@pytest.mark.parametrize("kind", LOCKS)
def test_locks_that_are_free_or_held(kind: str) -> None:
    structures, free, held = LOCKS[kind]
    image = MadeImage()
    image.declare(structures)
    lock = image.pointer("struct spinlock *", AT)[0]
    for word, is_held in ((free, False), *((one, True) for one in held)):
        image.write(AT, word.to_bytes(16, "little"))
        assert spin_is_locked(image, lock) is is_held


def test_locks_of_a_sort_that_is_not_known() -> None:
    image = MadeImage()
    image.declare("struct spinlock { int slock; };")
    assert spin_is_locked(image, image.pointer("struct spinlock *", AT)[0]) is None
    image = MadeImage()  # without CONFIG_SMP, there is nothing in it
    image.declare("struct arch_lock { int nothing; };" + RAW % "struct arch_lock")
    assert spin_is_locked(image, image.pointer("struct spinlock *", AT)[0]) is None


@pytest.mark.parametrize("word", [0, 1, 0x80000003])
def test_locks_of_s390(word: int) -> None:
    """``arch_spinlock_t`` has one integer: the CPU that holds the lock, plus 1."""
    made = MadeMemory()
    arch = made.typedef("arch_spinlock_t", made.struct(None, [("lock", made.int)]))
    raw = made.struct("raw_spinlock", [("raw_lock", arch)])
    lock = made.at(made.struct("spinlock", [("rlock", raw)]), BASE)
    made.write(BASE, word, 4)
    assert spin_is_locked(made.image, lock[0]) is bool(word)
