# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Writeback
---------

Mirrors :linux:`mm/backing-dev.c`.

``mapping_can_writeback()`` tells which files are written back: those of file systems whose
``struct backing_dev_info`` says so, and block devices.

With ``CONFIG_CGROUP_WRITEBACK``, a memcg that dirties files of a
device has a ``struct bdi_writeback`` of its own there. ``cgwb_create()`` takes a reference to the
memcg for it. ``cgwb_release_workfn()`` drops it when no inode uses the structure any more, and
takes the structure off ``offline_cgwbs`` later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from drgn import FaultError, Object, container_of, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.stacktrace_refs import Freeing
from memcg_inspect.linux.kernel.stacktrace_words import places_in
from memcg_inspect.linux.lib.list import OnFault, list_entries

__all__ = ("MappingReader", "cgwbs", "offline_cgwbs", "released_cgwbs")

#: ``BDI_CAP_WRITEBACK``, a macro.
_BDI_CAP_WRITEBACK = 1
#: ``BDEVFS_MAGIC`` of :linux:`include/uapi/linux/magic.h`.
_BDEVFS_MAGIC = 0x62646576


class MappingReader:
    """Tells which files are written back, ``mapping_can_writeback()``."""

    def __init__(self, image: Image) -> None:
        self._memory = image.memory
        self._host = offsetof(image.type("struct address_space"), "host")
        self._sb = offsetof(image.type("struct inode"), "i_sb")
        sb = image.type("struct super_block")
        self._magic, self._bdi = offsetof(sb, "s_magic"), offsetof(sb, "s_bdi")
        bdi = image.type("struct backing_dev_info")
        self._capabilities = offsetof(bdi, "capabilities")
        self._size = sizeof(member_type(bdi, "capabilities"))
        self._known: dict[int, bool] = {}
        self._of_sb: dict[int, bool] = {}

    def can_writeback(self, mapping: int) -> bool:
        """
        Return whether dirty pages of a file are counted, and written back.

        What was read of a file, and of its file system, is remembered.

        :param mapping: ``struct address_space *``
        :raises drgn.FaultError: if the file or its file system cannot be read
        """
        known = self._known.get(mapping)
        if known is None:
            known = self._known[mapping] = self._inode_can(self._memory.word(mapping + self._host))
        return known

    def _inode_can(self, inode: int) -> bool:
        if not inode:
            return False  # noop_backing_dev_info
        sb = self._memory.word(inode + self._sb)
        known = self._of_sb.get(sb)
        if known is None:
            known = self._of_sb[sb] = self._sb_can(sb)
        return known

    def _sb_can(self, sb: int) -> bool:
        # inode_to_bdi() takes the bdi of the disk for a block device. bdi_alloc() sets the flag.
        if self._memory.word(sb + self._magic) == _BDEVFS_MAGIC:
            return True
        bdi = self._memory.word(sb + self._bdi)
        data = self._memory.read(bdi + self._capabilities, self._size)
        return bool(int.from_bytes(data, self._memory.order) & _BDI_CAP_WRITEBACK)


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
