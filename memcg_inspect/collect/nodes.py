# SPDX-License-Identifier: LGPL-2.1-or-later
"""Read what the kernel keeps for all nodes together."""

from __future__ import annotations

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.fs.nfs import counts_writeback
from memcg_inspect.linux.mm.mmzone import memory_nodes, online_nodes, steady_nodes
from memcg_inspect.linux.mm.vmalloc import has_restored_areas, nr_vmalloc_pages
from memcg_inspect.linux.mm.vmstat import read_total_stats
from memcg_inspect.model import Coverage, Nodes

__all__ = ("read_nodes",)


def read_nodes(image: Image, coverage: Coverage) -> Nodes:
    """
    Read the totals of all nodes.

    :param coverage: counts what was read
    """
    try:
        vmalloc = nr_vmalloc_pages(image)
    except FaultError as error:
        coverage.miss("nr_vmalloc_pages", error.address, str(error))
        vmalloc = None
    try:
        nfs = counts_writeback(image)
    except FaultError as error:
        coverage.miss("list of modules", error.address, str(error))
        nfs = True  # it may be among them
    return Nodes(
        totals=read_total_stats(image, coverage),
        with_memory=memory_nodes(image),
        unsteady=frozenset(online_nodes(image)) - steady_nodes(image),
        vmalloc_pages=vmalloc,
        vmalloc_restored=has_restored_areas(image),
        writeback_by_nfs=nfs,
    )
