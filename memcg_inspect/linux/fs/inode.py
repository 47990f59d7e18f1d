# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Files of pages
--------------

Mirrors ``dump_mapping()`` of :linux:`fs/inode.c`, which names the file that a page belongs to, and
the flags in ``page->mapping`` of :linux:`include/linux/page-flags.h`.
"""

from __future__ import annotations

from drgn import Object, container_of

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import has_member
from memcg_inspect.image.strings import c_string, text
from memcg_inspect.linux.fs.d_path import d_path, dentry_path

__all__ = ("dentry_name", "mapping_name")

#: ``FOLIO_MAPPING_ANON`` (``PAGE_MAPPING_ANON`` up to 6.15).
_ANON = 1
#: ``FOLIO_MAPPING_FLAGS``: bit 1 is ``PAGE_MAPPING_MOVABLE``, or with bit 0 a page of KSM.
_FLAGS = 3


@per_image
def _alias(image: Image) -> str:
    # The union d_u has no name since commit 3b7d764a37d0 ("struct dentry: make ->d_u anonymous")
    # (in v7.1).
    return "d_alias" if has_member(image, "struct dentry", "d_alias") else "d_u.d_alias"


def mapping_name(image: Image, mapping: int, swap_cache: bool) -> str:
    """
    Return the path of the file that a user page belongs to, or a description in parentheses.

    :param mapping: ``page->mapping``, with its flags
    :param swap_cache: whether the page is in the swap cache
    :return: e.g. ``/var/log/syslog``, ``/tmp/x (deleted)``, ``(anonymous)``
    :raises drgn.FaultError: if the ``struct address_space``, inode or dentry cannot be read
    """
    if not mapping:
        # shmem_writeout() moves pages of tmpfs from their file to the swap cache.
        return "(swap cache)" if swap_cache else "(no file)"
    if mapping & _FLAGS:
        return "(anonymous)" if mapping & _ANON else "(movable)"
    inode = image.pointer("struct address_space *", mapping).host.read_()
    if not inode:
        return "(no file)"
    first = inode.i_dentry.first.read_()
    if not first:
        name = text(c_string(inode.i_sb.s_type.name))
        device = text(inode.i_sb.s_id.string_())
        return f"(inode {int(inode.i_ino)} of {name} {device})"
    path = dentry_name(image, container_of(first, "struct dentry", _alias(image)))
    return path if int(inode.i_nlink) else f"{path} (deleted)"


def dentry_name(image: Image, dentry: Object, mount: Object | None = None) -> str:
    """
    Return the path of a dentry.

    :param dentry: ``struct dentry *``
    :param mount: ``struct vfsmount *`` to resolve the path through; any mount if not given
    :raises drgn.FaultError: if the dentry cannot be read, or is not mounted anywhere
    """
    operations = dentry.d_op.read_()
    if operations and operations.d_dname:
        # Files with d_dname() have names without a directory, e.g. memfd:NAME.
        path = dentry_path(dentry) or c_string(dentry.d_name.name)
    else:
        path = d_path(image, dentry, mount)
    return text(path)
