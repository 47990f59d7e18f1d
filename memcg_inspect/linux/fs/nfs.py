# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages that NFS servers write back
---------------------------------

Mirrors :linux:`fs/nfs/write.c`.
"""

from __future__ import annotations

from drgn.helpers.linux.module import for_each_module

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import distinct

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
        return any(
            module.name.string_() == b"nfs" for module in distinct(for_each_module(image.prog))
        )
    except LookupError:
        return False  # CONFIG_MODULES=n
