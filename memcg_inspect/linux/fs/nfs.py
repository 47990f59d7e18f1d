# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages that NFS servers write back
---------------------------------

Mirrors :linux:`fs/nfs/write.c`.
"""

from __future__ import annotations

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.module import has_module

__all__ = ("counts_writeback",)


def counts_writeback(image: Image) -> bool:
    """
    Return whether there is an NFS client, which counts pages in ``NR_WRITEBACK`` of nodes only.

    ``nfs_folio_mark_unstable()`` counts what the server has not committed yet.

    :raises drgn.FaultError: if the list of modules cannot be read
    """
    try:
        image.symbol("nfs_commit_inode")  # CONFIG_NFS_FS=y
    except UnknownKernelError:
        pass
    else:
        return True
    try:
        return has_module(image, b"nfs")
    except UnknownKernelError:
        return False  # CONFIG_MODULES=n
