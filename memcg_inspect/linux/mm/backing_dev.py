# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Writeback of memcgs
-------------------

Mirrors :linux:`mm/backing-dev.c`. With ``CONFIG_CGROUP_WRITEBACK``, a memcg that dirties files of a
device has a ``struct bdi_writeback`` of its own there. ``cgwb_create()`` takes a reference to the
memcg for it. ``cgwb_release_workfn()`` drops it when no inode uses the structure any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from drgn import FaultError, Object, container_of

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import OnFault, list_entries

__all__ = ("cgwbs", "offline_cgwbs")


def cgwbs(image: Image, memcg: Object, on_fault: OnFault) -> Iterator[Object]:
    """
    Iterate over the ``struct bdi_writeback`` of a memcg.

    Those that were taken offline are not among them; see :func:`offline_cgwbs`.

    :param memcg: ``struct mem_cgroup *``
    :param on_fault: called once if the list is broken
    :return: Iterator of ``struct bdi_writeback *``
    :raises drgn.FaultError: if the memcg cannot be read
    """
    if not memcg.type_.type.has_member("cgwb_list"):
        return  # CONFIG_CGROUP_WRITEBACK=n
    # wb_memcg_offline() empties the list, and sets next to NULL so that it remains empty.
    if not memcg.cgwb_list.next:
        return
    head = memcg.cgwb_list.address_of_()
    yield from list_entries(image, "struct bdi_writeback", head, "memcg_node", on_fault)


def offline_cgwbs(image: Image, on_fault: OnFault) -> dict[int, list[int]]:
    """
    Return each ``struct bdi_writeback`` that was taken offline and is not released yet.

    :param on_fault: called for each that cannot be read, and if the list is broken
    :return: ``struct bdi_writeback *`` by ``struct mem_cgroup *``
    """
    found: defaultdict[int, list[int]] = defaultdict(list)
    try:
        head = image.object("offline_cgwbs").address_of_()
    except UnknownKernelError:
        return found  # CONFIG_CGROUP_WRITEBACK=n
    for wb in list_entries(image, "struct bdi_writeback", head, "offline_node", on_fault):
        try:
            memcg = container_of(wb.memcg_css.read_(), "struct mem_cgroup", "css")
        except FaultError as error:
            on_fault(error)
            continue
        found[memcg.value_()].append(wb.value_())
    return found
