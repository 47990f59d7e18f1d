# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Writeback of memcgs
-------------------

Mirrors :linux:`mm/backing-dev.c`. With ``CONFIG_CGROUP_WRITEBACK``, a memcg that dirties files of a
device has a ``struct bdi_writeback`` of its own there. ``cgwb_create()`` takes a reference to the
memcg for it. ``cgwb_release_workfn()`` drops it when no inode uses the structure any more, and
takes the structure off ``offline_cgwbs`` later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from drgn import FaultError, Object, container_of, offsetof

from memcg_inspect.image.image import Image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.stacktrace_refs import Freeing
from memcg_inspect.linux.kernel.stacktrace_words import places_in
from memcg_inspect.linux.lib.list import OnFault, list_entries

__all__ = ("cgwbs", "offline_cgwbs", "released_cgwbs")


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


def released_cgwbs(image: Image) -> Freeing | None:
    """
    Return how to find structures that workers are releasing, on the list or not any more.

    :return: ``None`` without ``CONFIG_CGROUP_WRITEBACK``
    """
    places = places_in(image, ("cgwb_release_workfn",))
    if not places:
        return None
    # What cannot be read is counted as such where the holders of references are read.
    found = offline_cgwbs(image, lambda error: None)
    work = offsetof(image.type("struct bdi_writeback"), "release_work")
    memcgs = {wb + offset: m for m, some in found.items() for wb in some for offset in (0, work)}
    return Freeing(places, memcgs.get)
