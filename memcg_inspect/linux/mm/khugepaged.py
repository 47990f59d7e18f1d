# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Pages of files that became huge pages
-------------------------------------

``collapse_file()`` of :linux:`mm/khugepaged.c` replaces the pages of a file by a huge page. Up to
6.19 it does not move ``NR_FILE_PAGES`` and ``NR_SHMEM`` from the memcgs and nodes of these pages to
those of the huge page, so that both are wrong from then on. Since 7.0 it does ("mm: khugepaged: fix
NR_FILE_PAGES and NR_SHMEM in collapse_file()").
"""

from __future__ import annotations

from drgn import FaultError
from drgn.helpers.linux.percpu import per_cpu

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.memcontrol import has_node_objcgs
from memcg_inspect.linux.mm.mmzone import possible_cpus

__all__ = ("may_have_collapsed_files",)


def may_have_collapsed_files(image: Image) -> bool:
    """
    Return whether ``NR_FILE_PAGES`` and ``NR_SHMEM`` may be wrong since pages became huge pages.

    No counter tells pages of files from anonymous ones: any huge page that was allocated for that
    (``THP_COLLAPSE_ALLOC``) may have been for a file.
    """
    # No type came with the fix. A per-node obj_cgroup came in 7.1, just after it.
    event = constant(image, "THP_COLLAPSE_ALLOC")
    if event is None or has_node_objcgs(image):
        return False
    try:
        states = image.object("vm_event_states")
        return any(per_cpu(states, cpu).event[event].value_() for cpu in possible_cpus(image))
    except (FaultError, UnknownKernelError):
        return True  # unreadable, or CONFIG_VM_EVENT_COUNTERS=n
