# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Names and paths of kernfs nodes
-------------------------------

Mirrors :linux:`fs/kernfs/dir.c`. drgn's :func:`~drgn.helpers.linux.kernfs.kernfs_path()` follows
parents for ever where damaged pointers make a circle.
"""

from __future__ import annotations

from drgn import FaultError, Object
from drgn.helpers.linux.kernfs import kernfs_parent

from memcg_inspect.image.strings import c_string

__all__ = ("kernfs_name", "kernfs_path")


def kernfs_name(node: Object) -> bytes:
    """
    Return the name of a node, e.g. of the directory of a cgroup; ``/`` for the root.

    :param node: ``struct kernfs_node *``
    :raises drgn.FaultError: if it cannot be read
    """
    return c_string(node.name) if kernfs_parent(node) else b"/"


def kernfs_path(node: Object) -> bytes:
    """
    Return the path of a node.

    :param node: ``struct kernfs_node *``
    :raises drgn.FaultError: if it cannot be read, or if its parents are a circle
    """
    names: list[bytes] = []
    seen: set[int] = set()
    while parent := kernfs_parent(node):
        if node.value_() in seen:
            raise FaultError("the parents of a kernfs node are a circle", node.value_())
        seen.add(node.value_())
        names.append(c_string(node.name))
        node = parent
    return b"/" + b"/".join(reversed(names))
