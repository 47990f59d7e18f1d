# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memory cgroups and their obj_cgroups
------------------------------------

Mirrors ``struct mem_cgroup``, ``struct mem_cgroup_per_node`` and ``struct obj_cgroup`` of
:linux:`include/linux/memcontrol.h`, and the tree of ``struct cgroup_subsys_state``
(:linux:`include/linux/cgroup-defs.h`) that memcgs are part of.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from drgn import NULL, FaultError, Object, container_of, offsetof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import constant, has_member, static_key_enabled
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.image.strings import text
from memcg_inspect.linux.fs.kernfs import kernfs_name, kernfs_path
from memcg_inspect.linux.kernel.cgroup_kill import (
    CSS_DYING,
    CSS_ONLINE,
    kill_is_deferred,
    running_kills,
)
from memcg_inspect.linux.lib.list import OnFault, idr_entries, list_entries, raise_fault
from memcg_inspect.linux.lib.percpu_refcount import percpu_ref_counts, percpu_ref_is_dying
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.model import (
    Accounting,
    Coverage,
    ImageError,
    Memcg,
    NotAccounted,
    Objcg,
    ObjcgMember,
    ObjcgPlace,
)

__all__ = (
    "accounting",
    "csses_made_since",
    "find_memcg",
    "has_node_objcgs",
    "keeps_original_objcgs",
    "memcg_children",
    "memcg_descendants",
    "memcg_path",
    "nodeinfo",
    "not_accounted",
    "objcg_nid",
    "objcg_owners",
    "on_default_hierarchy",
    "payer_of",
    "read_memcgs",
    "read_objcgs",
    "recover_objcgs",
    "root_memcg",
)

#: Static keys; unless they are on, no memcg is charged for memory of this sort. Linux 6.1 has
#: ``memcg_kmem_enabled_key``, and no key for BPF.
_KEYS: tuple[tuple[NotAccounted, tuple[str, ...]], ...] = (
    ("kernel memory", ("memcg_kmem_online_key", "memcg_kmem_enabled_key")),
    ("BPF", ("memcg_bpf_enabled_key",)),
    ("sockets", ("memcg_sockets_enabled_key",)),
)


@per_image
def accounting(image: Image) -> Accounting:
    """
    Return how the kernel accounts kernel memory.

    ``memcg``: a memcg has one obj_cgroup. ``objcg-per-node``: it has one for each node,
    since commit 01b9da291c49 ("mm: memcontrol: convert objcg to be per-memcg per-node type") (in
    v7.1).
    ``kmem-per-node``: it also has a counter of kernel memory for each node (the
    per-memcg-per-node series).
    """
    if constant(image, "NR_KMEM") is not None and has_member(image, "struct obj_cgroup", "nid"):
        return "kmem-per-node"
    return "objcg-per-node" if has_node_objcgs(image) else "memcg"


@per_image
def has_node_objcgs(image: Image) -> bool:
    """Return whether ``mem_cgroup_per_node`` holds the obj_cgroups (7.1), not ``mem_cgroup``."""
    return has_member(image, "struct mem_cgroup_per_node", "objcg")


def not_accounted(image: Image, coverage: Coverage) -> tuple[NotAccounted, ...]:
    """
    Return which memory the kernel charges to no memcg.

    The static keys are on since a memcg other than the root was made (``memcg_online_kmem()``,
    ``mem_cgroup_css_alloc()``), unless ``cgroup.memory=`` or the kernel's default is against it.
    Sockets are not charged on cgroup v1 before a memcg has a limit of them.

    A key that the kernel lacks says nothing.

    :param coverage: counts the keys that cannot be read
    """
    off: list[NotAccounted] = []
    for what, names in _KEYS:
        try:
            if any(static_key_enabled(image, name) is False for name in names):
                off.append(what)
            coverage.read += 1
        except FaultError as error:
            coverage.miss(f"whether {what} is accounted", error.address, str(error))
    return tuple(off)


def root_memcg(image: Image) -> Object:
    """
    Return the root memcg.

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
    # SUBSYS(memory) defines memory_cgrp_subsys_enabled_key in every kernel with the controller.
    if not root or static_key_enabled(image, "memory_cgrp_subsys_enabled_key") is False:
        raise ImageError("the memory controller is disabled in this kernel (cgroup_disable=memory)")
    return root


def memcg_children(image: Image, memcg: Object) -> Iterator[Object]:
    """
    Walk the children of a memcg, including removed ones that are not released yet.

    :param memcg: ``struct mem_cgroup *``
    :return: Iterator of ``struct mem_cgroup *``
    :raises drgn.FaultError: if the list of children cannot be read or is broken
    """
    return _children(image, memcg, raise_fault)


def _children(image: Image, memcg: Object, on_fault: OnFault) -> Iterator[Object]:
    head = memcg.css.children.address_of_()
    for css in list_entries(image, "struct cgroup_subsys_state", head, "sibling", on_fault):
        yield container_of(css, "struct mem_cgroup", "css")


def memcg_descendants(image: Image, memcg: Object) -> Iterator[Object]:
    """
    Walk a memcg and its descendants in pre-order.

    :param memcg: ``struct mem_cgroup *``
    :return: Iterator of ``struct mem_cgroup *``
    :raises drgn.FaultError: if a list of children cannot be read or is broken
    """
    todo, seen = [memcg], set[int]()
    while todo:
        memcg = todo.pop()
        if memcg.value_() in seen:
            raise FaultError("a memcg is its own ancestor", memcg.value_())
        seen.add(memcg.value_())
        yield memcg
        todo.extend(reversed(list(memcg_children(image, memcg))))


def memcg_path(memcg: Object) -> bytes:
    """
    Return the path of a memcg in the cgroup hierarchy.

    :param memcg: ``struct mem_cgroup *``
    :raises drgn.FaultError: if a name on the way to the root cannot be read, or if the way does not
        lead there
    """
    return kernfs_path(memcg.css.cgroup.kn)


def find_memcg(image: Image, path: bytes) -> Object:
    """
    Find a memcg by its path in the cgroup hierarchy.

    A removed memcg keeps its name until it is released, and another one with that name may be
    made meanwhile. One that is online is preferred.

    :return: ``struct mem_cgroup *``; ``NULL`` if there is none
    :raises drgn.FaultError: if a memcg on the way cannot be read
    """
    found = [root_memcg(image)]
    for name in filter(None, path.split(b"/")):
        found = [
            child
            for parent in found
            for child in memcg_children(image, parent)
            if kernfs_name(child.css.cgroup.kn) == name
        ]
    found.sort(key=lambda memcg: _is_dying(image, memcg))
    return found[0] if found else NULL(image.prog, "struct mem_cgroup *")


def _is_dying(image: Image, memcg: Object) -> bool:
    # kill_css() sets the flag in every supported kernel. The root is never removed.
    dying = constant(image, "CSS_DYING") or CSS_DYING
    return bool(memcg.css.parent) and bool(int(memcg.css.flags) & dying)


def payer_of(image: Image, memcg: Object) -> Object:
    """
    Return the memcg whose counters hold what a memcg is charged.

    :param memcg: ``struct mem_cgroup *``
    :return: ``struct mem_cgroup *``: the memcg, or if it was removed its nearest ancestor that
        was not
    :raises drgn.FaultError: if a memcg on the way cannot be read, or if its parents are a circle
    """
    seen: set[int] = set()
    while _is_dying(image, memcg):
        if memcg.value_() in seen:
            raise FaultError("a memcg is its own ancestor", memcg.value_())
        seen.add(memcg.value_())
        memcg = container_of(memcg.css.parent.read_(), "struct mem_cgroup", "css")
    return memcg


def read_memcgs(
    image: Image, coverage: Coverage, names: Coverage | None = None
) -> dict[int, Memcg]:
    """
    Read the tree of memcgs, including removed ones that are not released yet.

    :param coverage: counts the memcgs read, and those that could not be read
    :param names: counts the names and IDs read, and those that could not be read
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
    The memcgs read so far.

    :ivar memcgs: by ``struct mem_cgroup *``
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

        return _children(self.image, memcg, missed)

    def add_root(self, memcg: Object) -> None:
        try:
            self.add(memcg)
        except FaultError as error:
            self.coverage.miss("memcg", error.address, str(error))
            address = memcg.value_()
            # The path and the state of the root are known without reading it.
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
        # See _is_dying().
        flags = int(css.flags)
        is_dying = bool(flags & self._dying) and above is not None
        self._check_state(css, is_dying)
        self.memcgs[address] = Memcg(
            address=address,
            path=self._path(memcg, above),
            cgroup_id=self._cgroup_id(css),
            state="dying" if is_dying else "online",
            parent=None if above is None else above.address,
            payer=above.payer if is_dying and above is not None else address,
            # offline_css() clears the flag after the controller reparented the charges.
            offline=is_dying and not flags & self._online,
        )
        self.coverage.read += 1

    @cached_property
    def _running_kills(self) -> frozenset[int]:
        # A work item that is not found leaves a memcg unreadable, which is then counted.
        return running_kills(self.image, lambda error: None)

    def _check_state(self, css: Object, is_dying: bool) -> None:
        """
        Compare ``CSS_DYING`` with ``css->refcnt``, which ``kill_css()`` kills after it set the bit.

        Both are done under ``cgroup_mutex``: while nobody holds it, they agree, unless the second
        is deferred (7.2).

        :param css: ``struct cgroup_subsys_state``
        :raises drgn.FaultError: if they do not
        """
        if self.image.is_moving or percpu_ref_is_dying(css.refcnt.address_of_()) == is_dying:
            return
        if is_dying and kill_is_deferred(self.image, css, self._running_kills):
            return
        if not self.image.object("cgroup_mutex").owner.counter:
            reason = "CSS_DYING and the reference count of a memcg do not agree"
            raise FaultError(reason, css.flags.address_ or 0)

    def add_unlinked(self) -> None:
        """Add memcgs that lists do not contain: first by their ids, then the children of these."""
        idr = self.image.object("memory_cgrp_subsys").css_idr
        left = [
            container_of(css, "struct mem_cgroup", "css")
            for css in idr_entries(
                self.image, "struct cgroup_subsys_state", idr, lambda error: None
            )
        ]
        before, linked = -1, set(self.memcgs)
        while len(left) != before:  # parents first
            before = len(left)
            left = [memcg for memcg in left if not self._is_added(memcg)]
        # A child whose memory is missing cannot be found by its id. Only the list of its parent's
        # children shows that it exists.
        todo = [
            self.image.pointer("struct mem_cgroup *", address)
            for address in self.memcgs.keys() - linked
        ]
        while todo:
            memcg = todo.pop()
            for child in self.children(memcg):
                if child.value_() not in self.memcgs and self.try_to_add(child, memcg):
                    todo.append(child)

    def _is_added(self, memcg: Object) -> bool:
        try:
            if memcg.value_() not in self.memcgs:
                self.add(memcg)
        except FaultError:
            return False  # the failure was counted as a child, or with its parent
        return True

    def _path(self, memcg: Object, parent: Memcg | None) -> str:
        if parent is None:
            return "/"
        try:
            name = text(kernfs_name(memcg.css.cgroup.kn))
            self.names.read += 1
        except FaultError as error:
            self.names.miss("name of a cgroup", error.address, str(error))
            name = f"<memcg {memcg.value_():#x}>"
        return f"{parent.path.rstrip('/')}/{name}"

    def _cgroup_id(self, css: Object) -> int | None:
        # cgroup_id(): the inode number of the cgroup's directory.
        try:
            return int(css.cgroup.kn.id)
        except FaultError as error:
            self.names.miss("ID of a cgroup", error.address, str(error))
            return None


def csses_made_since(image: Image, memcgs: Iterable[int], coverage: Coverage) -> dict[int, int]:
    """
    Return how many ``struct cgroup_subsys_state`` were made after each memcg.

    Those of all controllers count, also those that are freed: no more memcgs were ever below it.

    :param memcgs: ``struct mem_cgroup *``
    :param coverage: counts what is unreadable
    :return: by ``struct mem_cgroup *``, without those for which it is not known
    """
    made: dict[int, int] = {}
    try:
        latest = int(image.object("css_serial_nr_next")) - 1
    except UnknownKernelError:
        return made  # without CONFIG_KALLSYMS_ALL, kallsyms has no variables
    except FaultError as error:
        coverage.miss("css_serial_nr_next", error.address, str(error))
        return made
    for address in memcgs:
        memcg = image.pointer("struct mem_cgroup *", address)
        try:
            made[address] = latest - int(memcg.css.serial_nr)
        except FaultError as error:
            coverage.miss("serial number of a memcg", error.address, str(error))
    return made


@per_image
def on_default_hierarchy(image: Image) -> bool:
    """
    Return whether the memory controller is on the cgroup v2 hierarchy.

    :raises ImageError: if ``memory_cgrp_subsys`` and the root memcg name different hierarchies:
        ``rebind_subsystems()`` changes both
    """
    root = image.object("memory_cgrp_subsys").root.value_()
    own = root_memcg(image).css.cgroup.root.value_()
    if own != root:
        raise ImageError(
            f"the memory controller is in the cgroup_root {root:#x}, and its root memcg in "
            f"{own:#x}: one of them is damaged"
        )
    return bool(root == image.object("cgrp_dfl_root").address_)


def nodeinfo(
    image: Image, memcg: Object, on_fault: OnFault | None = None
) -> Iterator[tuple[int, Object]]:
    """
    Walk the nodes of a memcg.

    :param memcg: ``struct mem_cgroup *``
    :param on_fault: called for each node that cannot be read; if not given, the error is raised
    :return: node and ``struct mem_cgroup_per_node *``
    :raises drgn.FaultError: if a node cannot be read, and *on_fault* is not given
    """
    for nid in possible_nodes(image):
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
    Read all obj_cgroups that memcgs refer to.

    These are the obj_cgroups in use, and those that ``memcg_reparent_objcgs()`` moved from removed
    memcgs to their parents.

    :param memcgs: result of :func:`read_memcgs()`
    :param coverage: counts the obj_cgroups that were read, and those that are unreadable
    :param unreadable: memcgs with unreadable obj_cgroups are added to this set
    :return: obj_cgroups by ``struct obj_cgroup *``
    """
    objcgs: dict[int, Objcg] = {}

    def missed(error: FaultError) -> None:
        coverage.miss("objcgs of a memcg", error.address, str(error))
        unreadable.add(address)

    for address in memcgs:
        memcg = image.pointer("struct mem_cgroup *", address)
        holders: Iterable[tuple[int | None, Object]] = [(None, memcg)]
        if has_node_objcgs(image):
            holders = nodeinfo(image, memcg, missed)
        for nid, holder in holders:
            is_root = memcgs[address].parent is None
            for objcg, member in _objcgs_of(image, holder, is_root, missed):
                try:
                    known = objcgs.get(objcg.value_()) or _objcg(image, objcg, nid, coverage)
                except FaultError as error:
                    missed(error)
                    continue
                objcgs[known.address] = replace(
                    known,
                    memcg_refs=known.memcg_refs + (member != "objcg_list"),
                    places=(*known.places, ObjcgPlace(address, nid, member)),
                )
    coverage.read += len(objcgs)
    return _with_refs(image, objcgs, coverage)


def _with_refs(image: Image, objcgs: dict[int, Objcg], coverage: Coverage) -> dict[int, Objcg]:
    """Add the references to obj_cgroups; ``None`` for what cannot be read."""
    at = offsetof(image.type("struct obj_cgroup"), "refcnt")
    refs = [image.pointer("struct percpu_ref *", address + at) for address in objcgs]
    counts = percpu_ref_counts(image, refs)
    found = {}
    for address, objcg in objcgs.items():
        count = counts[address + at]
        if isinstance(count, FaultError):
            coverage.miss("references of an objcg", count.address, str(count))
            found[address] = objcg
        else:
            found[address] = replace(objcg, refs=count)
    return found


def objcg_owners(image: Image, memcgs: Iterable[int], coverage: Coverage) -> dict[int, int]:
    """
    Return the memcgs that obj_cgroups were made for.

    A removed memcg refers to its first obj_cgroups until it is freed (6.7). The owner of any
    other obj_cgroup that was reparented is not known.

    :param memcgs: ``struct mem_cgroup *`` of the memcgs to read
    :return: ``struct mem_cgroup *`` by ``struct obj_cgroup *``
    """
    owners: dict[int, int] = {}

    def missed(error: FaultError) -> None:
        coverage.miss("objcgs of a memcg", error.address, str(error))

    for address in memcgs:
        memcg = image.pointer("struct mem_cgroup *", address)
        holders: Iterable[tuple[int | None, Object]] = [(None, memcg)]
        if has_node_objcgs(image):
            holders = nodeinfo(image, memcg, missed)
        for _, holder in holders:
            for objcg, _ in _held(image, holder, missed):
                owners[objcg.value_()] = address
    return owners


def keeps_original_objcgs(image: Image) -> bool:
    """Return whether removed memcgs refer to their first obj_cgroups (6.7)."""
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
    Read obj_cgroups that charges point to, but that could not be read through their memcg.

    :param memcgs: ``struct mem_cgroup *`` of the memcgs read
    :param is_whole: whether *memcgs* are all memcgs. If so, an obj_cgroup that refers to another
        memcg is not valid and left out
    :param addresses: ``struct obj_cgroup *`` that charges point to
    :param coverage: counts the obj_cgroups that were read, and those that are unreadable
    :return: valid obj_cgroups by ``struct obj_cgroup *``; their number of references is not known
    """
    objcgs: dict[int, Objcg] = {}
    for address in addresses:
        try:
            found = _objcg(image, image.pointer("struct obj_cgroup *", address), None, coverage)
        except FaultError as error:
            coverage.miss("objcg", error.address, str(error))
            continue
        if found.memcg in memcgs or not is_whole:
            objcgs[address] = replace(found, refs=None)
    coverage.read += len(objcgs)
    return objcgs


def _objcgs_of(
    image: Image, holder: Object, is_root: bool, on_fault: OnFault
) -> Iterator[tuple[Object, ObjcgMember]]:
    """
    Walk the obj_cgroups of a memcg, or of a memcg on a node.

    :param holder: ``struct mem_cgroup *`` or ``struct mem_cgroup_per_node *``
    :return: (``struct obj_cgroup *``, the member of the holder that refers to it)
    """
    faults: list[FaultError] = []
    yield from _held(image, holder, faults.append)
    if faults:
        on_fault(faults[0])
        return
    # memcg_reparent_objcgs() splices the list of a removed memcg into that of its parent and does
    # not reinitialize the head. A walk from that head never returns to it. holder->objcg is NULL
    # then. In 6.x it is also NULL for the root, whose list is valid.
    if holder.objcg or is_root:
        head = holder.objcg_list.address_of_()
        for objcg in list_entries(image, "struct obj_cgroup", head, "list", on_fault):
            yield objcg, "objcg_list"


def _held(image: Image, holder: Object, on_fault: OnFault) -> Iterator[tuple[Object, ObjcgMember]]:
    """Return the obj_cgroups that a memcg, or a memcg on a node, holds a reference to."""
    try:
        current = holder.objcg.read_()
        if current:
            yield current, "objcg"
        # Since 6.7 a memcg refers to its first obj_cgroup until it is freed.
        if holder.type_.type.has_member("orig_objcg"):
            original = holder.orig_objcg.read_()
            if original:
                yield original, "orig_objcg"
    except FaultError as error:
        on_fault(error)


def objcg_nid(image: Image, objcg: Object) -> int | None:
    """
    Return the node that an obj_cgroup is for.

    :param objcg: ``struct obj_cgroup *``
    :return: ``None`` if the kernel has one obj_cgroup for all nodes of a memcg, or if its memcg
        does not refer to this one
    :raises drgn.FaultError: if the obj_cgroup or its memcg cannot be read
    """
    if has_member(image, "struct obj_cgroup", "nid"):
        return int(objcg.nid)
    if not has_node_objcgs(image):
        return None
    heads: dict[int, int] = {}
    for nid, pn in nodeinfo(image, objcg.memcg.read_()):
        if any(held == objcg for held, _ in _held(image, pn, raise_fault)):
            return nid
        heads[pn.objcg_list.address_of_().value_()] = nid
    # memcg_reparent_objcgs() moved it to the list of the same node. Follow that list to its head.
    for entry in list_entries(
        image, "struct obj_cgroup", objcg.list.address_of_(), "list", raise_fault
    ):
        link = entry.list.address_of_().value_()
        if link in heads:
            return heads[link]
    return None


def _objcg(image: Image, objcg: Object, nid: int | None, coverage: Coverage) -> Objcg:
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
        refs=None,
        siblings=_siblings(image, value, coverage),
        set=value.set.value_() if members.has_member("set") else 0,
    )


def _siblings(image: Image, objcg: Object, coverage: Coverage) -> tuple[int, ...]:
    # The per-memcg-per-node series finds the obj_cgroups of other nodes through objcg->set.
    if not objcg.type_.has_member("set"):
        return ()
    try:
        return tuple(objcg.set.objcgs[nid].value_() for nid in possible_nodes(image))
    except FaultError as error:
        coverage.miss("siblings of an objcg", error.address, str(error))
        return ()
