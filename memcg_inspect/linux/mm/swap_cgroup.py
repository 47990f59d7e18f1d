# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs of swap entries
----------------------

Each used swap entry records the ID of the memcg that is charged for it, and holds one
``memcg->id.ref``. Mirrors :linux:`mm/swap_cgroup.c`, and since 7.2 :linux:`mm/swap_table.h`.

What differs between kernel releases:

- up to 6.13, ``swap_cgroup_ctrl[type].map`` is an array of pages that hold the IDs;
- since 6.14, it is one array of the IDs, two in each ``struct swap_cgroup``;
- since commit b197d41462c2 ("mm/memcg, swap: store cgroup id in cluster table directly") (in
  v7.2), the IDs are in ``swap_cluster_info.memcg_table``, one table for each cluster with entries.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, constant, has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.linux.mm.vmalloc import check_room
from memcg_inspect.model import Coverage

__all__ = ("swap_cgroup_pages", "swap_ids")

#: Bytes of one ID, an ``unsigned short``.
ID_SIZE = 2


def swap_ids(image: Image, coverage: Coverage) -> Counter[int]:
    """
    Return the number of swap entries that record each ID of a memcg.

    :param coverage: counts the pages or clusters of IDs that were read, and those that are
        unreadable
    """

    def missed(error: FaultError) -> None:
        coverage.miss("memcgs of swap entries", error.address, str(error))

    found: Counter[int] = Counter()
    empty = bytes(mem_map(image).page_size)
    for ids in _tables(image, missed):
        coverage.read += 1
        if ids == empty[: len(ids)]:
            continue
        column = array("H", ids)
        if image.memory.order != _NATIVE:
            column.byteswap()
        found.update(column)
    del found[0]
    return found


def swap_cgroup_pages(image: Image, coverage: Coverage) -> Iterator[int]:
    """
    Iterate over the pages of IDs, which only kernels up to 6.13 have.

    :param coverage: counts the tables of pages that are unreadable
    :return: ``struct page *``
    """

    def missed(error: FaultError) -> None:
        coverage.miss("memcgs of swap entries", error.address, str(error))

    if not has_member(image, "struct swap_cgroup_ctrl", "length"):
        return
    try:
        for control in image.object("swap_cgroup_ctrl").read_():
            if control.map:
                for _, page in _page_table(image, control.map, int(control.length), missed):
                    if page:
                        yield page
    except UnknownKernelError:
        return  # CONFIG_SWAP=n
    except FaultError as error:
        missed(error)


_NATIVE = "little" if array("H", b"\1\0")[0] == 1 else "big"


def _tables(image: Image, on_fault: OnFault) -> Iterator[bytes]:
    """Iterate over all arrays of IDs of all swap areas, in pieces of a page or less."""
    if has_member(image, "struct swap_cluster_info", "memcg_table"):
        for area in _areas(image, on_fault):
            try:
                yield from _of_clusters(image, area, on_fault)
            except FaultError as error:
                on_fault(error)
        return
    try:
        controls = image.object("swap_cgroup_ctrl").read_()
    except UnknownKernelError:
        return  # CONFIG_SWAP=n
    except FaultError as error:
        on_fault(error)
        return
    areas = list(_areas(image, on_fault))
    for swap_type, control in enumerate(controls):
        try:
            in_use = swap_type < len(areas) and _is_in_use(image, areas[swap_type])
            if not control.map:
                if in_use:
                    raise _missing("swap_cgroup_ctrl.map", areas[swap_type].value_())
            elif control.type_.has_member("length"):
                yield from _of_pages(image, control, in_use, on_fault)
            elif swap_type < len(areas):
                size = int(areas[swap_type].max) * ID_SIZE
                check_room(image, control.map.value_(), size)
                yield from _pieces(image, control.map.value_(), size, on_fault)
        except FaultError as error:
            on_fault(error)


def _areas(image: Image, on_fault: OnFault) -> Iterator[Object]:
    """Iterate over all ``struct swap_info_struct *``, in the order of their swap types."""
    try:
        areas = image.object("swap_info").read_()
        number = min(int(image.object("nr_swapfiles")), array_length(areas.type_))
    except UnknownKernelError:
        return  # CONFIG_SWAP=n
    except FaultError as error:
        on_fault(error)
        return
    for i in range(number):
        yield areas[i]


def _is_in_use(image: Image, area: Object) -> bool:
    """
    Return whether a swap area has all arrays of IDs.

    ``swapon()`` allocates them before it sets ``SWP_WRITEOK``, and ``swapoff()`` clears that flag
    before it frees them.
    """
    return bool(int(area.flags) & (constant(image, "SWP_WRITEOK") or 0))


def _missing(pointer: str, address: int) -> FaultError:
    return FaultError(f"{pointer} of a swap area in use is NULL", address)


def _of_clusters(image: Image, area: Object, on_fault: OnFault) -> Iterator[bytes]:
    memory, cluster = image.memory, image.type("struct swap_cluster_info")
    size, offset = sizeof(cluster), offsetof(cluster, "memcg_table")
    table = member_type(cluster, "memcg_table").type
    # The length of the table is SWAPFILE_CLUSTER.
    length = array_length(member_type(table, "id"))
    clusters, entries = area.cluster_info.value_(), int(area.max)
    in_use = _is_in_use(image, area)
    if not clusters:
        if in_use:
            on_fault(_missing("cluster_info", area.value_()))
        return
    room = -(-entries // length) * size
    check_room(image, clusters, room)
    count, count_size = offsetof(cluster, "count"), sizeof(member_type(cluster, "count"))
    for start, data in memory.pieces(clusters, room, size):
        if data is None:
            on_fault(FaultError("not in the image", clusters))
            continue
        for number, address in enumerate(memory.words(data, offset, size)):
            at = number * size
            if address:
                yield from _pieces(image, address, length * ID_SIZE, on_fault)
            elif in_use and any(data[at + count : at + count + count_size]):
                # swap_cluster_alloc_table() makes the table before a cluster has entries.
                on_fault(_missing("memcg_table of a cluster with entries", clusters + start + at))


def _of_pages(image: Image, control: Object, in_use: bool, on_fault: OnFault) -> Iterator[bytes]:
    """:param in_use: whether all pages are allocated"""
    frames = mem_map(image)
    for at, page in _page_table(image, control.map, int(control.length), on_fault):
        if page:
            yield from _pieces(image, frames.virt(page), frames.page_size, on_fault)
        elif in_use:
            on_fault(_missing("a page of swap_cgroup_ctrl.map", at))


def _page_table(
    image: Image, pages: Object, length: int, on_fault: OnFault
) -> Iterator[tuple[int, int]]:
    """Return the elements of a ``struct page **``: address, and ``struct page *`` or 0."""
    memory, size = image.memory, image.memory.word_size
    start = pages.value_()
    check_room(image, start, length * size)
    for offset, data in memory.pieces(start, length * size, size):
        if data is None:
            on_fault(FaultError("not in the image", start))
            continue
        for number, page in enumerate(memory.words(data)):
            yield start + offset + number * size, page


def _pieces(image: Image, address: int, size: int, on_fault: OnFault) -> Iterator[bytes]:
    step = mem_map(image).page_size
    for at in range(address, address + size, step):
        try:
            yield image.memory.read(at, min(step, address + size - at))
        except FaultError as error:
            on_fault(error)
