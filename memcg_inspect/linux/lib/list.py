# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Lists, trees and idrs with holes
--------------------------------

Mirrors :linux:`include/linux/list.h`, :linux:`include/linux/rbtree.h` and
:linux:`include/linux/idr.h`. drgn's own walks end where something cannot be read; these go
on with whatever can still be reached, and say what was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drgn import FaultError, Object, container_of

from memcg_inspect.image.image import image_of
from memcg_inspect.linux.lib.xarray import xa_entries

__all__ = ("OnFault", "idr_entries", "list_entries", "rbtree_entries")

OnFault = Callable[[FaultError], None]


def list_entries(type_name: str, head: Object, member: str, on_fault: OnFault) -> Iterator[Object]:
    """
    Walk a list, from both ends if it is broken.

    :param head: ``struct list_head *``
    :param member: name of the ``struct list_head`` in the entries
    :param on_fault: called once if the list is broken
    :return: pointers to entries; one that cannot be read is among them
    """
    type_ = image_of(head.prog_).type(type_name)
    seen = {head.value_()}
    try:
        for link in _links(head, "next", seen):
            yield container_of(link, type_, member)
        return
    except FaultError as error:
        on_fault(error)
    try:
        for link in _links(head, "prev", seen):
            yield container_of(link, type_, member)
    except FaultError:
        return  # told already


def _links(head: Object, way: str, seen: set[int]) -> Iterator[Object]:
    link = head.member_(way).read_()
    while link.value_() not in seen:
        seen.add(link.value_())
        yield link
        link = link.member_(way).read_()
    if way == "next" and link.value_() != head.value_():
        raise FaultError("the list does not lead back to its head", link.value_())


def rbtree_entries(
    type_name: str, root: Object, member: str, on_fault: OnFault
) -> Iterator[Object]:
    """
    Walk a red-black tree, in no particular order.

    :param root: ``struct rb_root *``
    :param on_fault: called for each node that cannot be read, and all below it is lost
    :return: pointers to entries; one that cannot be read is among them
    """
    type_ = image_of(root.prog_).type(type_name)
    try:
        todo = [root.rb_node.read_()]
    except FaultError as error:
        on_fault(error)
        return
    while todo:
        node = todo.pop()
        if not node:
            continue
        yield container_of(node, type_, member)
        try:
            todo += [node.rb_right.read_(), node.rb_left.read_()]
        except FaultError as error:
            on_fault(error)


def idr_entries(type_name: str, idr: Object, on_fault: OnFault) -> Iterator[Object]:
    """
    Walk what an idr points to.

    :param idr: ``struct idr``
    :param on_fault: called for each node that cannot be read, and all below it is lost
    :return: pointers to entries
    """
    prog = idr.prog_
    pointer = prog.pointer_type(image_of(prog).type(type_name))
    try:
        for entry in xa_entries(idr.idr_rt.address_of_(), on_fault):
            yield Object(prog, pointer, entry)
    except FaultError as error:
        on_fault(error)
