# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Paths of dentries
-----------------

Mirrors :linux:`fs/d_path.c`. drgn's :func:`~drgn.helpers.linux.fs.d_path()` follows parents and
mounts for ever where damaged pointers make a circle.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, TypeKind, container_of

from memcg_inspect.image.image import Image
from memcg_inspect.image.strings import c_string
from memcg_inspect.linux.lib.list import list_entries, raise_fault

__all__ = ("d_path", "dentry_path")

#: ``MNT_INTERNAL``: a mount of the kernel's own, whose root is not in any namespace.
_MNT_INTERNAL = 0x4000


def dentry_path(dentry: Object) -> bytes:
    """
    Return the path of a dentry in its filesystem, without a leading slash.

    :param dentry: ``struct dentry *``
    :raises drgn.FaultError: if it cannot be read, or if its parents are a circle
    """
    return b"/".join(reversed([c_string(d.d_name.name) for d in _up(dentry)]))


def d_path(image: Image, dentry: Object, vfsmount: Object | None = None) -> bytes:
    """
    Return the path of a dentry.

    :param dentry: ``struct dentry *``
    :param vfsmount: ``struct vfsmount *``; if not given, any mount of its filesystem
    :raises drgn.FaultError: if it cannot be read, if it is not mounted anywhere, or if parents or
        mounts are a circle
    """
    if vfsmount is None:
        mount = _any_mount(image, dentry.d_sb.read_())
    else:
        mount = container_of(vfsmount, "struct mount", "mnt")
    names: list[bytes] = []
    seen: set[int] = set()
    while mount.value_() not in seen:
        seen.add(mount.value_())
        root = mount.mnt.mnt_root.value_()
        climbed = list(_up(dentry, root))
        names += [c_string(d.d_name.name) for d in climbed]
        top = climbed[-1].d_parent.value_() if climbed else dentry.value_()
        parent = mount.mnt_parent.read_()
        # The last mount, or the root of the filesystem, since the mount does not show the dentry.
        if parent == mount or top != root:
            return b"/" + b"/".join(reversed(names))
        dentry, mount = mount.mnt_mountpoint.read_(), parent
    raise FaultError("the mounts are a circle", mount.value_())


def _up(dentry: Object, root: int = 0) -> Iterator[Object]:
    """Iterate over a dentry and its parents, up to *root* or to that of the filesystem."""
    seen: set[int] = set()
    while dentry.value_() != root:
        if dentry.value_() in seen:
            raise FaultError("the parents of a dentry are a circle", dentry.value_())
        seen.add(dentry.value_())
        parent = dentry.d_parent.read_()
        if parent == dentry:
            return
        yield dentry
        dentry = parent


def _any_mount(image: Image, super_block: Object) -> Object:
    """Return a mount of a filesystem, ``struct mount *``, an internal one if there is no other."""

    internal = None
    for mount in _mounts(image, super_block.s_mounts):
        if not mount.mnt.mnt_flags & _MNT_INTERNAL:
            return mount
        internal = internal or mount
    if internal is None:
        raise FaultError("the filesystem of a dentry is mounted nowhere", super_block.value_())
    return internal


def _mounts(image: Image, s_mounts: Object) -> Iterator[Object]:
    """Iterate over the mounts of a filesystem, ``struct mount *``."""

    # Commit 09a1b33c080f ("preparations to taking MNT_WRITE_HOLD out of ->mnt_flags") (in v6.18):
    # a list without head. Before, it is a struct list_head.
    if s_mounts.type_.unaliased_kind() != TypeKind.POINTER:
        head = s_mounts.address_of_()
        yield from list_entries(image, "struct mount", head, "mnt_instance", raise_fault)
        return
    mount, seen = s_mounts.read_(), set[int]()
    while mount:
        if mount.value_() in seen:
            raise FaultError("the mounts of a filesystem are a circle", mount.value_())
        seen.add(mount.value_())
        yield mount
        mount = mount.mnt_next_for_sb.read_()
