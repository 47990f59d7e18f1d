# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Linked lists, red-black trees and idrs
--------------------------------------

Mirrors :linux:`include/linux/list.h`, :linux:`include/linux/rbtree.h` and
:linux:`include/linux/idr.h`. drgn's helpers end at the first entry that cannot be read, and do not
end where damaged pointers make a circle. These functions report the fault and continue with the
entries that they can still reach. They visit each entry once, and no more than the kernel can have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drgn import FaultError, Object, container_of

from memcg_inspect.image.image import Image
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.lib.xarray import MOST_NODES, xa_entries

__all__ = (
    "OnFault",
    "hlist_entries",
    "idr_entries",
    "list_entries",
    "raise_fault",
    "rbtree_entries",
)

OnFault = Callable[[FaultError], None]


def raise_fault(error: FaultError) -> None:
    """
    End a walk at the first fault, as its *on_fault*.

    :raises drgn.FaultError: the fault
    """
    raise error


def list_entries(
    image: Image, type_name: str, head: Object, member: str, on_fault: OnFault
) -> Iterator[Object]:
    """
    Iterate over a list, from both ends if it is broken.

    :param type_name: type of the entries, e.g. ``struct task_struct``
    :param head: ``struct list_head *``
    :param member: name of the ``struct list_head`` in an entry
    :param on_fault: called once if the list is broken
    :return: pointers to entries. An entry that cannot be read can be among them.
    """
    type_ = image.type(type_name)
    seen = {untagged(image, head.value_())}
    try:
        for link in _links(image, head, "next", seen):
            yield container_of(link, type_, member)
        return
    except FaultError as error:
        on_fault(error)
    try:
        for link in _links(image, head, "prev", seen):
            yield container_of(link, type_, member)
    except FaultError:
        return  # on_fault was called for the other direction


def _links(image: Image, head: Object, way: str, seen: set[int]) -> Iterator[Object]:
    link = head.member_(way).read_()
    while (address := untagged(image, link.value_())) not in seen:
        if len(seen) > MOST_NODES:
            raise FaultError("the list does not end", link.value_())
        seen.add(address)
        yield link
        link = link.member_(way).read_()
    if way == "next" and address != untagged(image, head.value_()):
        raise FaultError("the list does not lead back to its head", link.value_())


def hlist_entries(
    image: Image, type_name: str, head: Object, member: str, on_fault: OnFault
) -> Iterator[Object]:
    """
    Iterate over a list whose head is one pointer, as hash tables have.

    :param type_name: type of the entries
    :param head: ``struct hlist_head *``
    :param member: name of the ``struct hlist_node`` in an entry
    :param on_fault: called once if the list is broken; the rest is left out
    :return: pointers to entries. An entry that cannot be read can be among them.
    """
    type_, seen = image.type(type_name), set[int]()
    try:
        node = head.first.read_()
        while node:
            if node.value_() in seen or len(seen) == MOST_NODES:
                raise FaultError("the list is a circle, or does not end", node.value_())
            seen.add(node.value_())
            yield container_of(node, type_, member)
            node = node.next.read_()
    except FaultError as error:
        on_fault(error)


def rbtree_entries(
    image: Image, type_name: str, root: Object, member: str, on_fault: OnFault
) -> Iterator[Object]:
    """
    Iterate over a red-black tree, in no particular order.

    :param type_name: type of the entries
    :param root: ``struct rb_root *``
    :param member: name of the ``struct rb_node`` in an entry
    :param on_fault: called for each node that cannot be read, or that the walk reaches a second
        time. The nodes below it are left out.
    :return: pointers to entries. An entry that cannot be read can be among them.
    """
    type_, seen = image.type(type_name), set[int]()
    try:
        todo = [root.rb_node.read_()]
    except FaultError as error:
        on_fault(error)
        return
    while todo:
        node = todo.pop()
        if not node:
            continue
        if node.value_() in seen:
            on_fault(FaultError("the tree has a node twice", node.value_()))
            continue
        if len(seen) == MOST_NODES:
            on_fault(FaultError("the tree does not end", node.value_()))
            return
        seen.add(node.value_())
        yield container_of(node, type_, member)
        try:
            todo += [node.rb_right.read_(), node.rb_left.read_()]
        except FaultError as error:
            on_fault(error)


def idr_entries(image: Image, type_name: str, idr: Object, on_fault: OnFault) -> Iterator[Object]:
    """
    Iterate over the pointers in an idr.

    :param type_name: type of the entries
    :param idr: ``struct idr``
    :param on_fault: called for each node that cannot be read. The nodes below it are left out.
    :return: pointers to entries
    """
    pointer = image.prog.pointer_type(image.type(type_name))
    try:
        for entry in xa_entries(image, idr.idr_rt.address_of_(), on_fault):
            yield Object(image.prog, pointer, entry)
    except FaultError as error:
        on_fault(error)
