# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Percpu reference counts
-----------------------

Mirrors :linux:`include/linux/percpu-refcount.h` and :linux:`lib/percpu-refcount.c`.
"""

from __future__ import annotations

from drgn import Object

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets

__all__ = ("percpu_ref_count", "percpu_ref_is_dying")

_PERCPU_REF_ATOMIC = 1
_PERCPU_REF_DEAD = 2
_FLAGS = _PERCPU_REF_ATOMIC | _PERCPU_REF_DEAD


def percpu_ref_is_dying(ref: Object) -> bool:
    """
    Return whether a ``struct percpu_ref`` was killed, ``percpu_ref_is_dying()``.

    :param ref: ``struct percpu_ref *``
    :raises drgn.FaultError: if it cannot be read
    """
    return bool(ref.percpu_count_ptr.value_() & _PERCPU_REF_DEAD)


def percpu_ref_count(image: Image, ref: Object) -> int:
    """
    Return the number of references to a ``struct percpu_ref``.

    In percpu mode, the references are the atomic count less ``PERCPU_COUNT_BIAS``, plus the
    counts of the CPUs. During a switch to atomic mode that is still so, and
    ``__percpu_ref_switch_to_atomic()`` holds one more reference, which is not counted here.

    :param ref: ``struct percpu_ref *``
    :raises drgn.FaultError: if any part cannot be read
    """
    memory = image.memory
    limit = 1 << 8 * memory.word_size
    bias = limit >> 1
    pointer, data = ref.percpu_count_ptr.value_(), ref.data.read_()
    count = int(data.count.counter) % limit if data else pointer >> 2
    is_percpu = not pointer & _PERCPU_REF_ATOMIC
    # The sum of the CPUs' counts can be negative, so a biased count can be less than the bias.
    is_switching = not is_percpu and count > bias >> 1
    if is_percpu or is_switching:
        base = pointer & ~_FLAGS
        count += sum(memory.word(base + offset) for offset in percpu_offsets(image).values())
        count -= bias + is_switching
    return count % limit
