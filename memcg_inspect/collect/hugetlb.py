# SPDX-License-Identifier: LGPL-2.1-or-later
"""Read the cgroups of the hugetlb controller, with the huge pages that they are charged for."""

from __future__ import annotations

from drgn import FaultError

from memcg_inspect.collect.partial import Partial
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.hugetlb_cgroup import (
    hugetlb_sizes,
    is_hugetlb_lock_held,
    moves_usage,
    read_hugetlb_cgroups,
    why_no_hugetlb_cgroups,
)
from memcg_inspect.linux.mm.mmzone import online_nodes
from memcg_inspect.model import Coverage
from memcg_inspect.model_hugetlb import Hugetlb

__all__ = ("read_hugetlb",)


def read_hugetlb(image: Image, total: Partial, coverage: Coverage) -> Hugetlb:
    """
    Return the cgroups, and the huge pages that refer to them.

    :param total: what the pass over all page frames found
    :param coverage: counts what was read
    """
    not_kept = why_no_hugetlb_cgroups(image)
    if not_kept is not None:
        return Hugetlb(not_kept=not_kept)
    try:
        sizes = hugetlb_sizes(image)
    except FaultError as error:
        coverage.miss("sizes of huge pages", error.address, str(error))
        return Hugetlb()
    return Hugetlb(
        sizes=sizes,
        cgroups=read_hugetlb_cgroups(image, len(sizes), coverage),
        charged=total.hugetlb,
        nids=tuple(online_nodes(image)),
        moves_usage=moves_usage(image),
        is_locked=is_hugetlb_lock_held(image),
    )
