# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memory cgroups and their objcgs
-------------------------------

Mirrors ``struct mem_cgroup``, ``struct mem_cgroup_per_node`` and ``struct obj_cgroup``
of :linux:`include/linux/memcontrol.h`, and the tree of
:linux:`include/linux/cgroup-defs.h` that they hang in.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from drgn import FaultError, Object, container_of
from drgn.helpers.linux.cgroup import cgroup_name

from memcg_inspect.image.image import Image, image_of, per_image
from memcg_inspect.image.layout import constant, has_member, static_key_enabled
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.lib.list import OnFault, idr_entries, list_entries
from memcg_inspect.linux.lib.percpu_refcount import percpu_ref_count
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.model import Accounting, Coverage, ImageError, Memcg, Objcg

__all__ = (
    "accounting",
    "has_node_objcgs",
    "keeps_original_objcgs",
    "memory_usage",
    "nodeinfo",
    "objcg_owners",
    "on_default_hierarchy",
    "read_memcgs",
    "read_objcgs",
    "recover_objcgs",
    "root_memcg",
)

#: ``CSS_ONLINE`` and ``CSS_DYING``, should the anonymous enum be missing from the types.
CSS_ONLINE = 2
CSS_DYING = 16


@per_image
def accounting(image: Image) -> Accounting:
    """
    Tell what the kernel's accounting of kernel memory is kept by.

    Found from what the types offer: one objcg for each memcg, or one for each memcg and
    node (7.2), or also a counter of kernel memory for each memcg and node (the
    per-memcg-per-node series).
    """
    if constant(image, "NR_KMEM") is not None and has_member(image, "struct obj_cgroup", "nid"):
        return "kmem-per-node"
    return "objcg-per-node" if has_node_objcgs(image) else "memcg"


@per_image
def has_node_objcgs(image: Image) -> bool:
    """Whether ``mem_cgroup_per_node`` holds the objcgs; else ``mem_cgroup`` does."""
    return has_member(image, "struct mem_cgroup_per_node", "objcg")


def root_memcg(image: Image) -> Object:
    """
    Return the root of the tree.

    :return: ``struct mem_cgroup *``
    :raises ImageError: if the kernel has no memory controller, or it is disabled
    """
    try:
        root = image.object("root_mem_cgroup").read_()
    except UnknownKernelError:
        raise ImageError(
            "this kernel has no memory controller (there is no root_mem_cgroup: "
            "CONFIG_MEMCG is off)"
        ) from None
    # The controller's key is there in every kernel that has cgroups: SUBSYS(memory).
    if not root or static_key_enabled(image, "memory_cgrp_subsys_enabled_key") is False:
        raise ImageError("the memory controller is disabled in this kernel (cgroup_disable=memory)")
    return root


def read_memcgs(
    image: Image, coverage: Coverage, names: Coverage | None = None
) -> dict[int, Memcg]:
    """
    Read the tree of memcgs, removed ones included until they are released.

    :param names: names that were read, and those that could not be
    :return: memcgs by ``struct mem_cgroup *``, parents first
    """
    tree = _Tree(image, coverage, names if names is not None else Coverage())
    todo = [root_memcg(image)]
    tree.add_root(todo[0])
    while todo:
        memcg = todo.pop()
        found = [child for child in tree.children(memcg) if tree.try_to_add(child, memcg)]
        todo.extend(reversed(found))
    if tree.partial:
        tree.add_unlinked()
    for address in tree.partial:
        tree.memcgs[address] = replace(tree.memcgs[address], whole=False)
    return tree.memcgs


class _Tree:
    """
    The memcgs met so far.

    :ivar partial: memcgs some of whose children could not be read
    """

    def __init__(self, image: Image, coverage: Coverage, names: Coverage) -> None:
        self.image = image
        self.coverage = coverage
        self.names = names
        self.memcgs: dict[int, Memcg] = {}
        self.partial: set[int] = set()
        self._dying = constant(image, "CSS_DYING") or CSS_DYING
        self._online = constant(image, "CSS_ONLINE") or CSS_ONLINE

    def children(self, memcg: Object) -> Iterator[Object]:
        def missed(error: FaultError) -> None:
            self.partial.add(memcg.value_())
            self.coverage.miss("children of a memcg", error.address, str(error))

        head = memcg.css.children.address_of_()
        for css in list_entries("struct cgroup_subsys_state", head, "sibling", missed):
            yield container_of(css, "struct mem_cgroup", "css")

    def add_root(self, memcg: Object) -> None:
        try:
            self.add(memcg)
        except FaultError as error:
            self.coverage.miss("memcg", error.address, str(error))
            address = memcg.value_()
            # All that it is for is known without reading it.
            self.memcgs[address] = Memcg(address, "/", None, "online", None, address)
            self.partial.add(address)

    def try_to_add(self, memcg: Object, parent: Object) -> bool:
        if memcg.value_() in self.memcgs:
            error = FaultError("the list of a memcg's children is broken", memcg.value_())
        else:
            try:
                self.add(memcg)
                return True
            except FaultError as fault:
                error = fault
        self.partial.add(parent.value_())
        self.coverage.miss("memcg", error.address, str(error))
        return False

    def add(self, memcg: Object) -> None:
        address, css = memcg.value_(), memcg.css
        parent_css, above = css.parent.read_(), None
        if parent_css:
            parent = container_of(parent_css, "struct mem_cgroup", "css").value_()
            above = self.memcgs.get(parent)
            if above is None:
                raise FaultError("the parent of a memcg could not be read", parent)
        # kill_css() sets the flag on every kernel here; the root is never removed.
        flags = int(css.flags)
        is_dying = bool(flags & self._dying) and above is not None
        self.memcgs[address] = Memcg(
            address=address,
            path=self._path(memcg, above),
            cgroup_id=_cgroup_id(css),
            state="dying" if is_dying else "online",
            parent=None if above is None else above.address,
            payer=above.payer if is_dying and above is not None else address,
            # offline_css() clears the flag when the controller is done.
            offline=is_dying and not flags & self._online,
        )
        self.coverage.read += 1

    def add_unlinked(self) -> None:
        """Find those that the broken lists no longer lead to by their ids."""
        idr = self.image.object("memory_cgrp_subsys").css_idr
        left = [
            container_of(css, "struct mem_cgroup", "css")
            for css in idr_entries("struct cgroup_subsys_state", idr, lambda error: None)
        ]
        before = -1
        while len(left) != before:  # parents first
            before = len(left)
            left = [memcg for memcg in left if not self._is_added(memcg)]

    def _is_added(self, memcg: Object) -> bool:
        try:
            if memcg.value_() not in self.memcgs:
                self.add(memcg)
        except FaultError:
            return False  # counted already, as a child or with its parent
        return True

    def _path(self, memcg: Object, parent: Memcg | None) -> str:
        if parent is None:
            return "/"
        try:
            name = cgroup_name(memcg.css.cgroup).decode(errors="backslashreplace")
            self.names.read += 1
        except FaultError as error:
            self.names.miss("name of a cgroup", error.address, str(error))
            name = f"<memcg {memcg.value_():#x}>"
        return f"{parent.path.rstrip('/')}/{name}"


def _cgroup_id(css: Object) -> int | None:
    # cgroup_id(): the inode number of its folder.
    try:
        return int(css.cgroup.kn.id)
    except FaultError:
        return None


@per_image
def on_default_hierarchy(image: Image) -> bool:
    """Whether the memory controller is on the cgroup v2 hierarchy."""
    root = image.object("memory_cgrp_subsys").root.value_()
    return bool(root == image.object("cgrp_dfl_root").address_)


def memory_usage(memcg: Object) -> int:
    """
    Return a memcg's page counter, ``memory.usage``, in pages.

    :param memcg: ``struct mem_cgroup *``
    """
    return int(memcg.memory.usage.counter)


def nodeinfo(memcg: Object, on_fault: OnFault | None = None) -> Iterator[tuple[int, Object]]:
    """
    Walk the nodes of a memcg.

    :param memcg: ``struct mem_cgroup *``
    :param on_fault: called for each node that cannot be read; without it the error is raised
    :return: (nid, ``struct mem_cgroup_per_node *``)
    """
    for nid in possible_nodes(image_of(memcg.prog_)):
        try:
            pn = memcg.nodeinfo[nid].read_()
        except FaultError as error:
            if on_fault is None:
                raise
            on_fault(error)
            continue
        if pn:
            yield nid, pn


def read_objcgs(
    image: Image, memcgs: dict[int, Memcg], coverage: Coverage, unreadable: set[int]
) -> dict[int, Objcg]:
    """
    Read every objcg there is, from the memcgs: those in use, and those that removed
    memcgs left to their parents.

    :param unreadable: the memcgs some of whose objcgs cannot be read are added to these
    :return: objcgs by ``struct obj_cgroup *``
    """
    objcgs: dict[int, Objcg] = {}

    def missed(error: FaultError) -> None:
        coverage.miss("objcgs of a memcg", error.address, str(error))
        unreadable.add(address)

    for address in memcgs:
        memcg = Object(image.prog, "struct mem_cgroup *", address)
        holders: Iterable[tuple[int | None, Object]] = [(None, memcg)]
        if has_node_objcgs(image):
            holders = nodeinfo(memcg, missed)
        for nid, holder in holders:
            for objcg, held in _objcgs_of(holder, memcgs[address].parent is None, missed):
                try:
                    known = objcgs.get(objcg.value_()) or _objcg(objcg, nid, coverage)
                except FaultError as error:
                    missed(error)
                    continue
                objcgs[known.address] = replace(known, memcg_refs=known.memcg_refs + held)
    coverage.read += len(objcgs)
    return objcgs


def objcg_owners(image: Image, memcgs: Iterable[int], coverage: Coverage) -> dict[int, int]:
    """
    Return for whom obj_cgroups were made, as far as memcgs still tell: a removed one does since
    6.8, until it is freed.

    :param memcgs: ``struct mem_cgroup *``
    :return: ``struct mem_cgroup *`` by ``struct obj_cgroup *``
    """
    owners: dict[int, int] = {}

    def missed(error: FaultError) -> None:
        coverage.miss("objcgs of a memcg", error.address, str(error))

    for address in memcgs:
        memcg = Object(image.prog, "struct mem_cgroup *", address)
        holders: Iterable[tuple[int | None, Object]] = [(None, memcg)]
        if has_node_objcgs(image):
            holders = nodeinfo(memcg, missed)
        for _, holder in holders:
            for objcg in _held(holder, missed):
                owners[objcg.value_()] = address
    return owners


def keeps_original_objcgs(image: Image) -> bool:
    """Whether removed memcgs tell which obj_cgroups they had (6.8)."""
    holder = "mem_cgroup_per_node" if has_node_objcgs(image) else "mem_cgroup"
    return has_member(image, f"struct {holder}", "orig_objcg")


def recover_objcgs(
    image: Image,
    memcgs: Container[int],
    is_whole: bool,
    addresses: Iterable[int],
    coverage: Coverage,
) -> dict[int, Objcg]:
    """
    Read objcgs that charges point to, but that no list leads to any more.

    :param addresses: what charges point to
    :param is_whole: whether all memcgs were read, so that any other is none
    :return: those that belong to a memcg; how many references the memcg has is not known
    """
    objcgs: dict[int, Objcg] = {}
    for address in addresses:
        try:
            found = _objcg(Object(image.prog, "struct obj_cgroup *", address), None, coverage)
        except FaultError as error:
            coverage.miss("objcg", error.address, str(error))
            continue
        if found.memcg in memcgs or not is_whole:
            objcgs[address] = replace(found, refs=None)
    coverage.read += len(objcgs)
    return objcgs


def _objcgs_of(holder: Object, is_root: bool, on_fault: OnFault) -> Iterator[tuple[Object, bool]]:
    """Objcgs, and whether the pointer to them comes with a reference."""
    faults: list[FaultError] = []
    for objcg in _held(holder, faults.append):
        yield objcg, True
    if faults:
        on_fault(faults[0])
        return
    # The list of an offlined memcg was spliced into its parent's and its own head left
    # dangling: walking it never ends. The root of 6.x has a list and no objcg.
    if holder.objcg or is_root:
        head = holder.objcg_list.address_of_()
        for objcg in list_entries("struct obj_cgroup", head, "list", on_fault):
            yield objcg, False


def _held(holder: Object, on_fault: OnFault) -> Iterator[Object]:
    """Objcgs that a memcg, or its part of a node, holds a reference to."""
    try:
        current = holder.objcg.read_()
        if current:
            yield current
        # 6.8 and newer keep a pointer and a reference to the first objcg until the memcg is
        # freed.
        if holder.type_.type.has_member("orig_objcg"):
            original = holder.orig_objcg.read_()
            if original:
                yield original
    except FaultError as error:
        on_fault(error)


def _objcg(objcg: Object, nid: int | None, coverage: Coverage) -> Objcg:
    value = objcg[0].read_()
    members = value.type_
    if members.has_member("nid"):
        nid = int(value.nid)
    return Objcg(
        address=objcg.value_(),
        memcg=value.memcg.value_(),
        nid=nid,
        is_root=bool(value.is_root) if members.has_member("is_root") else False,
        nr_charged_bytes=int(value.nr_charged_bytes.counter),
        refs=_refs(objcg.refcnt.address_of_(), coverage),
        siblings=_siblings(value, coverage),
    )


def _siblings(objcg: Object, coverage: Coverage) -> tuple[int, ...]:
    # Kernels that account percpu memory by node find the obj_cgroups of other nodes so.
    if not objcg.type_.has_member("set"):
        return ()
    image = image_of(objcg.prog_)
    try:
        return tuple(objcg.set.objcgs[nid].value_() for nid in possible_nodes(image))
    except FaultError as error:
        coverage.miss("siblings of an objcg", error.address, str(error))
        return ()


def _refs(ref: Object, coverage: Coverage) -> int | None:
    try:
        return percpu_ref_count(ref)
    except FaultError as error:
        coverage.miss("references of an objcg", error.address, str(error))
        return None
