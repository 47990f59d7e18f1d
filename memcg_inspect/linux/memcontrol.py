# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memory cgroups and their objcgs
-------------------------------

Mirrors ``struct mem_cgroup``, ``struct mem_cgroup_per_node`` and ``struct obj_cgroup``
of :linux:`include/linux/memcontrol.h`, and the tree of
:linux:`include/linux/cgroup-defs.h` that they hang in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from drgn import FaultError, Object, Program, container_of
from drgn.helpers.linux.cgroup import cgroup_name
from drgn.helpers.linux.list import list_for_each_entry

from memcg_inspect.linux.layout import constant, has_member, per_program, static_key_enabled
from memcg_inspect.linux.mmzone import possible_nodes
from memcg_inspect.linux.percpu_refcount import percpu_ref_count
from memcg_inspect.model import Accounting, Coverage, ImageError, Memcg, Objcg

__all__ = (
    "accounting",
    "for_each_memcg",
    "has_node_objcgs",
    "memory_usage",
    "nodeinfo",
    "on_default_hierarchy",
    "read_memcgs",
    "read_objcgs",
    "root_memcg",
)

#: ``CSS_DYING``, should the anonymous enum be missing from the types.
CSS_DYING = 16


@per_program
def accounting(prog: Program) -> Accounting:
    """
    Tell what the kernel's accounting of kernel memory is kept by.

    Found from what the types offer: one objcg for each memcg, or one for each memcg and
    node (7.2), or also a counter of kernel memory for each memcg and node (the
    per-memcg-per-node series).
    """
    if constant(prog, "NR_KMEM") is not None and has_member(prog, "struct obj_cgroup", "nid"):
        return "kmem-per-node"
    return "objcg-per-node" if has_node_objcgs(prog) else "memcg"


@per_program
def has_node_objcgs(prog: Program) -> bool:
    """Whether ``mem_cgroup_per_node`` holds the objcgs; else ``mem_cgroup`` does."""
    return has_member(prog, "struct mem_cgroup_per_node", "objcg")


def root_memcg(prog: Program) -> Object:
    """
    Return the root of the tree.

    :return: ``struct mem_cgroup *``
    :raises ImageError: if the kernel has no memory controller, or it is disabled
    """
    try:
        root = prog["root_mem_cgroup"].read_()
    except KeyError:
        raise ImageError(
            "this kernel has no memory controller (there is no root_mem_cgroup: "
            "CONFIG_MEMCG is off)"
        ) from None
    # The controller's key is there in every kernel that has cgroups: SUBSYS(memory).
    if not root or static_key_enabled(prog, "memory_cgrp_subsys_enabled_key") is False:
        raise ImageError("the memory controller is disabled in this kernel (cgroup_disable=memory)")
    return root


def for_each_memcg(
    prog: Program, on_fault: Callable[[FaultError], None] | None = None
) -> Iterator[Object]:
    """
    Walk all memcgs, parents first, removed ones included until they are released.

    :param on_fault: called where the children of a memcg cannot be read, and the walk goes
        on; without it the error is raised
    :return: ``struct mem_cgroup *`` objects
    """
    todo = [root_memcg(prog)]
    seen = {todo[0].value_()}
    while todo:
        memcg = todo.pop()
        yield memcg
        found: list[Object] = []
        try:
            for child in _children(memcg):
                if child.value_() in seen:
                    raise FaultError("the list of a memcg's children is broken", child.value_())
                seen.add(child.value_())
                found.append(child)
        except FaultError as error:
            if on_fault is None:
                raise
            on_fault(error)
        todo.extend(reversed(found))


def _children(memcg: Object) -> Iterator[Object]:
    head = memcg.css.children.address_of_()
    for css in list_for_each_entry("struct cgroup_subsys_state", head, "sibling"):
        yield container_of(css, "struct mem_cgroup", "css")


def read_memcgs(prog: Program, coverage: Coverage) -> dict[int, Memcg]:
    """
    Read the tree of memcgs.

    :return: memcgs by ``struct mem_cgroup *``, parents first
    """
    dying = constant(prog, "CSS_DYING") or CSS_DYING
    memcgs: dict[int, Memcg] = {}

    def missed(error: FaultError) -> None:
        coverage.miss("children of a memcg", error.address, str(error))

    for memcg in for_each_memcg(prog, missed):
        try:
            _add_memcg(memcgs, memcg, dying, coverage)
        except FaultError as error:
            missed(error)
    return memcgs


def _add_memcg(memcgs: dict[int, Memcg], memcg: Object, dying: int, coverage: Coverage) -> None:
    address, css = memcg.value_(), memcg.css
    parent_css = css.parent.read_()
    parent = container_of(parent_css, "struct mem_cgroup", "css").value_() if parent_css else None
    above = memcgs.get(parent) if parent is not None else None
    # kill_css() sets the flag on every kernel here; the root is never removed.
    is_dying = bool(int(css.flags) & dying) and above is not None
    memcgs[address] = Memcg(
        address=address,
        path=_path(css, above, coverage),
        cgroup_id=_cgroup_id(css),
        state="dying" if is_dying else "online",
        parent=parent,
        payer=above.payer if is_dying and above is not None else address,
    )
    coverage.read += 1


def _path(css: Object, parent: Memcg | None, coverage: Coverage) -> str:
    if parent is None:
        return "/"
    try:
        name = cgroup_name(css.cgroup).decode(errors="backslashreplace")
    except FaultError as error:
        coverage.miss("name of a cgroup", error.address, str(error))
        name = f"<cgroup {css.cgroup.value_():#x}>"
    return f"{parent.path.rstrip('/')}/{name}"


def _cgroup_id(css: Object) -> int:
    # cgroup_id(): the inode number of its folder.
    try:
        return int(css.cgroup.kn.id)
    except FaultError:
        return 0


@per_program
def on_default_hierarchy(prog: Program) -> bool:
    """Whether the memory controller is on the cgroup v2 hierarchy."""
    root = prog["memory_cgrp_subsys"].root.value_()
    return bool(root == prog["cgrp_dfl_root"].address_)


def memory_usage(memcg: Object) -> int:
    """
    Return a memcg's page counter, ``memory.usage``, in pages.

    :param memcg: ``struct mem_cgroup *``
    """
    return int(memcg.memory.usage.counter)


def nodeinfo(memcg: Object) -> Iterator[tuple[int, Object]]:
    """
    Walk the nodes of a memcg.

    :param memcg: ``struct mem_cgroup *``
    :return: (nid, ``struct mem_cgroup_per_node *``)
    """
    for nid in possible_nodes(memcg.prog_):
        pn = memcg.nodeinfo[nid].read_()
        if pn:
            yield nid, pn


def read_objcgs(prog: Program, memcgs: dict[int, Memcg], coverage: Coverage) -> dict[int, Objcg]:
    """
    Read every objcg there is, from the memcgs: those in use, and those that removed
    memcgs left to their parents.

    :return: objcgs by ``struct obj_cgroup *``
    """
    objcgs: dict[int, Objcg] = {}
    for address in memcgs:
        memcg = Object(prog, "struct mem_cgroup *", address)
        holders: Iterator[tuple[int | None, Object]]
        holders = nodeinfo(memcg) if has_node_objcgs(prog) else iter([(None, memcg)])
        for nid, holder in holders:
            try:
                for objcg, held in _objcgs_of(holder, memcgs[address].parent is None):
                    known = objcgs.get(objcg.value_())
                    if known is None:
                        known = _objcg(objcg, nid, coverage)
                        coverage.read += 1
                    objcgs[known.address] = replace(known, memcg_refs=known.memcg_refs + held)
            except FaultError as error:
                coverage.miss("objcgs of a memcg", error.address, str(error))
    return objcgs


def _objcgs_of(holder: Object, is_root: bool) -> Iterator[tuple[Object, bool]]:
    """Objcgs, and whether the pointer to them comes with a reference."""
    current = holder.objcg.read_()
    if current:
        yield current, True
    # 6.8 and newer keep a pointer and a reference to the first objcg until the memcg is freed.
    if holder.type_.type.has_member("orig_objcg"):
        original = holder.orig_objcg.read_()
        if original:
            yield original, True
    # The list of an offlined memcg was spliced into its parent's and its own head left
    # dangling: walking it never ends. The root of 6.x has a list and no objcg.
    if current or is_root:
        head = holder.objcg_list.address_of_()
        for objcg in list_for_each_entry("struct obj_cgroup", head, "list"):
            yield objcg, False


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
    )


def _refs(ref: Object, coverage: Coverage) -> int | None:
    try:
        return percpu_ref_count(ref)
    except FaultError as error:
        coverage.miss("references of an objcg", error.address, str(error))
        return None
