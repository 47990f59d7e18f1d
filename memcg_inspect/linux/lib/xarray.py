# SPDX-License-Identifier: LGPL-2.1-or-later
"""
XArrays in bulk
---------------

Mirrors :linux:`include/linux/xarray.h`: one read for each node, not for each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drgn import FaultError, Object, offsetof

from memcg_inspect.image.image import image_of
from memcg_inspect.image.layout import array_length

__all__ = ("xa_entries",)


def xa_entries(xa: Object, on_fault: Callable[[FaultError], None] | None = None) -> Iterator[int]:
    """
    Walk the pointers in an XArray; values and siblings are left out.

    :param xa: ``struct xarray *``
    :param on_fault: called where a node cannot be read, and the walk goes on; without it
        the error is raised
    """
    image = image_of(xa.prog_)
    memory, node_type = image.memory, image.type("struct xa_node")
    slots = offsetof(node_type, "slots")
    length = array_length(next(m for m in node_type.members or () if m.name == "slots").type)
    todo = [xa.xa_head.value_()]
    while todo:
        entry = todo.pop()
        if not entry & 3:
            if entry:
                yield entry
        elif entry & 3 == 2 and entry > 4096:  # xa_is_node()
            try:
                data = memory.read(entry - 2 + slots, length * memory.word_size)
            except FaultError as error:
                if on_fault is None:
                    raise
                on_fault(error)
                continue
            todo.extend(reversed([e for e in memory.words(data) if e]))
