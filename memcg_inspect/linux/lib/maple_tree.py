# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Maple trees
-----------

Mirrors :linux:`include/linux/maple_tree.h` and ``ma_data_end()`` of :linux:`lib/maple_tree.c`. Each
node is one read. drgn's ``mt_for_each()`` reads each pivot and each slot, and does not end where
damaged pointers make a circle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, constant, member_type
from memcg_inspect.linux.lib.xarray import MOST_NODES

__all__ = ("maple_entries",)

#: ``MAPLE_NODE_MASK``: nodes are aligned to 256 bytes. The lower bits of a pointer to one have its
#: type, ``MAPLE_NODE_TYPE_SHIFT`` and ``MAPLE_NODE_TYPE_MASK``.
_NODE_MASK = 255
_TYPE_SHIFT, _TYPE_MASK = 3, 15
#: Values of ``enum maple_type``, for images whose types lack it.
_LEAF, _RANGE, _ARANGE = 1, 2, 3
#: ``xa_is_node()``: larger entries with the same low bits are nodes, not values of the tree's own.
_LARGEST_VALUE = 4096


class _Layout(NamedTuple):
    """
    The layout of one type of nodes.

    :ivar is_leaf: whether the slots hold entries, not nodes
    :ivar has_gaps: whether the number of slots in use is always in ``meta``
    :ivar pivots: offset of the first pivot, in bytes
    :ivar slots: offset of the first slot, in bytes
    :ivar length: number of slots; there is one pivot less
    :ivar end: offset of ``meta.end``, in bytes
    """

    is_leaf: bool
    has_gaps: bool
    pivots: int
    slots: int
    length: int
    end: int


@per_image
def _layouts(image: Image) -> dict[int, _Layout]:
    """Return the layout of nodes by value of ``enum maple_type``."""

    def layout(member: str, is_leaf: bool) -> _Layout:
        node = image.type("struct maple_node")
        inner = member_type(node, member)
        return _Layout(
            is_leaf=is_leaf,
            has_gaps=inner.has_member("gap"),
            pivots=offsetof(node, f"{member}.pivot"),
            slots=offsetof(node, f"{member}.slot"),
            length=array_length(member_type(inner, "slot")),
            end=offsetof(node, f"{member}.meta.end"),
        )

    return {
        constant(image, "maple_leaf_64") or _LEAF: layout("mr64", True),
        constant(image, "maple_range_64") or _RANGE: layout("mr64", False),
        constant(image, "maple_arange_64") or _ARANGE: layout("ma64", False),
    }


def maple_entries(image: Image, tree: Object) -> Iterator[int]:
    """
    Iterate over the pointers in a maple tree, in no particular order.

    :param tree: ``struct maple_tree *``
    :raises drgn.FaultError: if a node cannot be read, if it cannot be one, or if the walk reaches
        it a second time
    """
    memory, seen = image.memory, set[int]()
    root = tree.ma_root.value_()
    if not _is_node(root):
        if root:
            yield root
        return
    size = sizeof(image.type("struct maple_node"))
    todo = [(root, (1 << 8 * memory.word_size) - 1)]
    while todo:
        entry, last = todo.pop()
        address = entry & ~_NODE_MASK
        layout = _layouts(image).get(entry >> _TYPE_SHIFT & _TYPE_MASK)
        if layout is None:
            raise FaultError("not a node of a maple tree", address)
        if address in seen or len(seen) == MOST_NODES:
            raise FaultError("the maple tree has a node twice, or too many", address)
        seen.add(address)
        data = memory.read(address, size)
        pivots, slots = _pivots_and_slots(image, layout, data, last, address)
        if layout.is_leaf:
            yield from (slot for slot in slots if slot and not slot & 3)
        else:
            todo += zip(slots, [*pivots, last], strict=True)


def _is_node(entry: int) -> bool:
    return entry & 3 == 2 and entry > _LARGEST_VALUE


def _pivots_and_slots(
    image: Image, layout: _Layout, data: bytes, last: int, address: int
) -> tuple[list[int], list[int]]:
    """
    Return the slots of a node that are in use, and the pivots between them.

    :param last: the largest index that the node is for
    :raises drgn.FaultError: if the node has fewer slots than it says
    """
    word = image.memory.word_size
    pivots = image.memory.words(data[layout.pivots :][: (layout.length - 1) * word])
    slots = image.memory.words(data[layout.slots :][: layout.length * word])
    # ma_data_end()
    if layout.has_gaps or not pivots[-1]:
        end = data[layout.end]
    else:
        end = layout.length - (2 if pivots[-1] == last else 1)
    if end >= layout.length:
        raise FaultError(f"{end + 1} slots in a node of a maple tree", address)
    return pivots[:end], slots[: end + 1]
