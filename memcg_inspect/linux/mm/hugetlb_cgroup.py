# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Cgroups that are charged for huge pages
---------------------------------------

Mirrors ``struct hugetlb_cgroup`` of :linux:`include/linux/hugetlb_cgroup.h`, and
:linux:`mm/hugetlb_cgroup.c`. A huge page in use refers to the cgroup that is charged for it: in
``folio->_hugetlb_cgroup``, up to 6.2 in ``page->private`` of its page ``SUBPAGE_INDEX_CGROUP``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from drgn import FaultError, Object, container_of, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import (
    array_length,
    constant,
    has_member,
    member_type,
    static_key_enabled,
)
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.strings import text
from memcg_inspect.linux.fs.kernfs import kernfs_name
from memcg_inspect.linux.kernel.cgroup_kill import CSS_DYING
from memcg_inspect.linux.kernel.locking import spin_is_locked
from memcg_inspect.linux.lib.list import list_entries
from memcg_inspect.linux.mm.hugetlb import HugetlbPages, huge_page_orders
from memcg_inspect.linux.mm.mm_types import RawPiece
from memcg_inspect.linux.mm.mmzone import mem_map, possible_nodes
from memcg_inspect.model import Coverage
from memcg_inspect.model_hugetlb import HugetlbCgroup, HugetlbSize

__all__ = (
    "HugetlbChargeReader",
    "hugetlb_sizes",
    "is_hugetlb_lock_held",
    "moves_usage",
    "read_hugetlb_cgroups",
    "why_no_hugetlb_cgroups",
)

_TYPE = "struct hugetlb_cgroup"


def why_no_hugetlb_cgroups(image: Image) -> str | None:
    """Return why a kernel charges no cgroups for huge pages; ``None`` if it does."""
    # Per-node usage: commit f47761999052 ("hugetlb: add hugetlb.*.numa_stat file") (in v5.17).
    if not has_member(image, _TYPE, "nodeinfo"):
        return "this kernel was built without CONFIG_CGROUP_HUGETLB"
    if static_key_enabled(image, "hugetlb_cgrp_subsys_enabled_key") is False:
        return "the hugetlb controller is disabled (cgroup_disable=hugetlb)"
    return None


@per_image
def moves_usage(image: Image) -> bool:
    """
    Return whether the usage of a node moves together with a huge page.

    ``hugetlb_cgroup_move_usage()`` does so when a cgroup is removed, and when a page migrates. A
    kernel without that function leaves the usage where it was, and later takes it from another
    cgroup or node. So does, as far as can be told, one into which it was inlined.
    """
    try:
        image.symbol("hugetlb_cgroup_move_usage")
    except UnknownKernelError:
        return False
    return True


def is_hugetlb_lock_held(image: Image) -> bool | None:
    """Return whether ``hugetlb_lock`` is held; ``None`` if that cannot be told."""
    try:
        return spin_is_locked(image, image.object("hugetlb_lock"))
    except (FaultError, UnknownKernelError):
        return None


def hugetlb_sizes(image: Image) -> tuple[HugetlbSize, ...]:
    """
    Return the sizes of huge pages, in the order of ``hstates``.

    :raises drgn.FaultError: if they cannot be read
    """
    size = mem_map(image).page_size
    return tuple(HugetlbSize(_name(size << order), order) for order in huge_page_orders(image))


def _name(size: int) -> str:
    """Return a size as ``mem_fmt()`` writes it into names of files."""
    for shift, unit in ((30, "GB"), (20, "MB")):
        if size >> shift:
            return f"{size >> shift}{unit}"
    return f"{size >> 10}KB"


class HugetlbChargeReader:
    """Finds the huge pages that are charged, and the cgroups that they are charged to."""

    def __init__(self, image: Image) -> None:
        self._memory = image.memory
        self._pages = HugetlbPages(image)
        self._size = mem_map(image).size
        self._orders: frozenset[int] = frozenset()
        self._at = 0
        if why_no_hugetlb_cgroups(image) is None:
            self._at = self._owner_at(image)
            try:
                self._orders = frozenset(size.order for size in hugetlb_sizes(image))
            except FaultError:
                return  # read_hugetlb_cgroups() reports it

    def _owner_at(self, image: Image) -> int:
        if has_member(image, "struct folio", "_hugetlb_cgroup"):
            return int(offsetof(image.type("struct folio"), "_hugetlb_cgroup"))
        # Before commit 59838b2566ee ("mm/hugetlb: convert hugetlb_cgroup_from_page() to folios")
        # and those after it (in v6.3).
        index = constant(image, "SUBPAGE_INDEX_CGROUP")
        if index is None:
            raise UnknownKernelError("the cgroups of huge pages are in no place that is known")
        return index * self._size + int(offsetof(image.type("struct page"), "private"))

    def read(self, raw: RawPiece) -> Iterator[tuple[tuple[int, int, int], int]]:
        """
        Return the huge pages of a piece of the memory map that are charged.

        :return: (``struct hugetlb_cgroup *``, order, node) and number of pages
        """
        for i, order in raw.orders.items():
            if order in self._orders and self._pages.begins(raw.data, i):
                at = i * self._size + self._at
                if at + self._memory.word_size > len(raw.data):
                    continue  # a head whose tails are not there: no huge page
                owner = self._memory.word_at(raw.data, at)
                if owner:
                    yield (owner, order, raw.nid(i)), 1 << order


def read_hugetlb_cgroups(image: Image, sizes: int, coverage: Coverage) -> dict[int, HugetlbCgroup]:
    """
    Read the tree of cgroups of the hugetlb controller, with those that were removed.

    :param sizes: number of sizes of huge pages
    :param coverage: counts the cgroups that were read, and what is unreadable
    :return: by ``struct hugetlb_cgroup *``, parents first
    """
    reader, found = _CgroupReader(image, sizes), dict[int, HugetlbCgroup]()
    try:
        subsys = constant(image, "hugetlb_cgrp_id") or 0
        css = image.object("hugetlb_cgrp_subsys").root.cgrp.subsys[subsys].read_()
        todo: list[tuple[Object, HugetlbCgroup | None]] = [(css, None)]
    except FaultError as error:
        coverage.miss("root of the hugetlb controller", error.address, str(error))
        return found

    def missed(error: FaultError) -> None:
        coverage.miss("children of a hugetlb cgroup", error.address, str(error))

    while todo:
        css, parent = todo.pop()
        cgroup = container_of(css, _TYPE, "css")
        try:
            if cgroup.value_() in found:
                raise FaultError("a hugetlb cgroup is on two lists", cgroup.value_())
            one = found[cgroup.value_()] = reader.read(cgroup, parent)
        except FaultError as error:
            coverage.miss("hugetlb cgroup", error.address, str(error))
            continue
        coverage.read += 1
        children = list_entries(
            image, "struct cgroup_subsys_state", css.children.address_of_(), "sibling", missed
        )
        todo.extend((child, one) for child in reversed(list(children)))
    return found


class _CgroupReader:
    """Reads cgroups, each in few reads."""

    def __init__(self, image: Image, sizes: int) -> None:
        self._memory, self._sizes = image.memory, sizes
        self._nids = possible_nodes(image)
        self._dying = constant(image, "CSS_DYING") or CSS_DYING
        cgroup = image.type(_TYPE)
        counters = member_type(cgroup, "hugepage")
        self._counters, self._room = offsetof(cgroup, "hugepage"), sizeof(counters)
        self._each = self._room // array_length(counters)
        self._usage = offsetof(image.type("struct page_counter"), "usage")
        self._nodes = offsetof(cgroup, "nodeinfo")

    def read(self, cgroup: Object, parent: HugetlbCgroup | None) -> HugetlbCgroup:
        """
        Read one cgroup.

        :param cgroup: ``struct hugetlb_cgroup *``
        :raises drgn.FaultError: if it cannot be read
        """
        address, path = cgroup.value_(), "/"
        if parent is not None:
            name = text(kernfs_name(cgroup.css.cgroup.kn))
            path = f"{parent.path.rstrip('/')}/{name}"
        memory = self._memory
        counters = memory.read(address + self._counters, self._room)
        at = range(self._usage, self._sizes * self._each, self._each)
        return HugetlbCgroup(
            address=address,
            path=path,
            parent=None if parent is None else parent.address,
            is_online=parent is None or not int(cgroup.css.flags) & self._dying,
            usage=tuple(memory.signed_at(counters, offset) for offset in at),
            on_nodes=self._on_nodes(address),
        )

    def _on_nodes(self, address: int) -> Mapping[tuple[int, int], int]:
        memory, word = self._memory, self._memory.word_size
        found: dict[tuple[int, int], int] = {}
        nodes = memory.words(memory.read(address + self._nodes, len(self._nids) * word))
        for nid, node in zip(self._nids, nodes, strict=True):
            if not node:
                continue  # for_each_node() leaves out what is no possible node
            # struct hugetlb_cgroup_per_node is an array of usages.
            usage = memory.read(node, self._sizes * word)
            for size in range(self._sizes):
                found[size, nid] = memory.signed_at(usage, size * word)
        return found
