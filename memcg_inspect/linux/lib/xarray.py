# SPDX-License-Identifier: LGPL-2.1-or-later
"""
XArrays
-------

Mirrors :linux:`include/linux/xarray.h`. Each node is one read. drgn's ``xa_for_each()`` reads
each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drgn import FaultError, Object, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length

__all__ = ("MOST_NODES", "xa_entries")

#: No list, tree or XArray that is read here has more entries or nodes: ``PID_MAX_LIMIT``.
MOST_NODES = 1 << 22


def xa_entries(
    image: Image, xa: Object, on_fault: Callable[[FaultError], None] | None = None
) -> Iterator[int]:
    """
    Iterate over the pointers in an XArray. Values and sibling entries are left out.

    :param xa: ``struct xarray *``
    :param on_fault: called for each node that cannot be read, or that the walk reaches a second
        time; then the walk continues with the others
    :raises drgn.FaultError: if there is such a node and no *on_fault*
    """
    memory, node_type = image.memory, image.type("struct xa_node")
    slots = offsetof(node_type, "slots")
    length = array_length(next(m for m in node_type.members or () if m.name == "slots").type)
    todo, seen = [xa.xa_head.value_()], set[int]()
    while todo:
        entry = todo.pop()
        if not entry & 3:
            if entry:
                yield entry
        elif entry & 3 == 2 and entry > 4096:  # xa_is_node()
            try:
                if entry in seen or len(seen) == MOST_NODES:
                    raise FaultError("the XArray has a node twice, or too many", entry - 2)
                seen.add(entry)
                data = memory.read(entry - 2 + slots, length * memory.word_size)
            except FaultError as error:
                if on_fault is None:
                    raise
                on_fault(error)
                continue
            todo.extend(reversed([e for e in memory.words(data) if e]))
