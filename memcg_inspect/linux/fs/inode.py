# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Which file a page is of
-----------------------

Mirrors ``struct address_space`` and ``struct inode`` of :linux:`include/linux/fs.h`, and the
flags in ``page->mapping`` of :linux:`include/linux/page-flags.h`.
"""

from __future__ import annotations

from drgn import FaultError, Object, container_of
from drgn.helpers.linux.fs import d_path, dentry_path

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_member

__all__ = ("dentry_name", "mapping_name")

#: ``PAGE_MAPPING_ANON`` and ``PAGE_MAPPING_MOVABLE`` (``FOLIO_MAPPING_KSM``).
_ANON = 1
_FLAGS = 3


@per_image
def _alias(image: Image) -> str:
    # In a union without a name since commit 3b7d764a37d0 ("struct dentry: make ->d_u anonymous")
    # (in v7.1).
    return "d_alias" if has_member(image, "struct dentry", "d_alias") else "d_u.d_alias"


def mapping_name(image: Image, mapping: int, swap_cache: bool) -> str:
    """
    Name what a user page belongs to: the path of its file, or what else it is.

    :param mapping: ``page->mapping``, with its flags
    :param swap_cache: whether the page is in the swap cache
    :raises drgn.FaultError: if it cannot be read
    """
    if not mapping:
        # Pages of tmpfs lose their file on the way out.
        return "(swap cache)" if swap_cache else "(no file)"
    if mapping & _FLAGS:
        return "(anonymous)" if mapping & _ANON else "(movable)"
    inode = Object(image.prog, "struct address_space *", mapping).host.read_()
    if not inode:
        return "(no file)"
    first = inode.i_dentry.first.read_()
    if not first:
        name = inode.i_sb.s_type.name.string_().decode(errors="backslashreplace")
        device = inode.i_sb.s_id.string_().decode(errors="backslashreplace")
        return f"(inode {int(inode.i_ino)} of {name} {device})"
    path = dentry_name(container_of(first, "struct dentry", _alias(image)))
    return path if int(inode.i_nlink) else f"{path} (deleted)"


def dentry_name(dentry: Object, mount: Object | None = None) -> str:
    """
    Return the path of a dentry.

    :param dentry: ``struct dentry *``
    :param mount: ``struct vfsmount *`` through which it is seen; any, if it is not given
    :raises drgn.FaultError: if it cannot be read
    """
    try:
        operations = dentry.d_op.read_()
        if operations and operations.d_dname:
            # Such files have names without folders: memfd:NAME.
            path = dentry_path(dentry) or dentry.d_name.name.string_()
        else:
            path = d_path(dentry) if mount is None else d_path(mount, dentry)
    except ValueError as error:  # mounted nowhere
        raise FaultError(str(error), dentry.value_()) from None
    return str(path.decode(errors="backslashreplace"))
