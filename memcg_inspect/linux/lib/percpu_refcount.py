# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Percpu reference counts
-----------------------

Mirrors :linux:`include/linux/percpu-refcount.h` and :linux:`lib/percpu-refcount.c`.
"""

from __future__ import annotations

from collections.abc import Iterable

from drgn import FaultError, Object

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.percpu_defs import PercpuRange, read_percpu

__all__ = ("percpu_ref_count", "percpu_ref_counts", "percpu_ref_is_dying")

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

    :param ref: ``struct percpu_ref *``
    :raises drgn.FaultError: if any part cannot be read
    """
    (count,) = percpu_ref_counts(image, [ref]).values()
    if isinstance(count, FaultError):
        raise count
    return count


def percpu_ref_counts(image: Image, refs: Iterable[Object]) -> dict[int, int | FaultError]:
    """
    Return the number of references to many ``struct percpu_ref``, with few reads.

    In percpu mode, the references are the atomic count less ``PERCPU_COUNT_BIAS``, plus the
    counts of the CPUs. During a switch to atomic mode that is still so, and
    ``__percpu_ref_switch_to_atomic()`` holds one more reference, which is not counted here.

    :param refs: ``struct percpu_ref *``
    :return: by the address of the ``struct percpu_ref``; less than zero if too many references were
        dropped; the error if a part cannot be read
    """
    size = image.memory.word_size
    limit = 1 << 8 * size
    bias = limit >> 1
    found: dict[int, int | FaultError] = {}
    held_in: dict[PercpuRange, dict[int, int]] = {}
    for ref in refs:
        at = ref.value_()
        try:
            pointer, data = ref.percpu_count_ptr.value_(), ref.data.read_()
            # percpu_ref_exit() keeps the count above the flags.
            count = int(data.count.counter) if data else _signed(pointer >> 2, limit >> 2)
            count %= limit
        except FaultError as error:
            found[at] = error
            continue
        is_percpu = not pointer & _PERCPU_REF_ATOMIC
        # The sum of the CPUs' counts can be negative, so a biased count can be less than the bias.
        # A count that is not biased is near zero, on either side.
        is_switching = not is_percpu and abs(count - bias) < bias >> 1
        if is_percpu or is_switching:
            parts = PercpuRange(pointer & ~_FLAGS, size)
            held_in.setdefault(parts, {})[at] = count - bias - is_switching
        else:
            found[at] = _signed(count, limit)
    for parts, copies in read_percpu(image, held_in):
        for at, count in held_in[parts].items():
            if isinstance(copies, FaultError):
                found[at] = copies
            else:
                held = sum(image.memory.word_at(copy, 0) for copy in copies.values())
                found[at] = _signed(count + held, limit)
    return found


def _signed(count: int, limit: int) -> int:
    """Return a sum of unsigned words as ``atomic_long_read()`` would."""
    return (count + limit // 2) % limit - limit // 2
