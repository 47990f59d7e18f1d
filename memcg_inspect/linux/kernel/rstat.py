# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Lists of memcgs to flush
------------------------

Mirrors ``css_rstat_updated_list()`` of :linux:`kernel/cgroup/rstat.c`. A CPU that changes a counter
of a memcg puts the memcg on its list of updated ones, if it is not there yet. A flush takes the
memcgs off the lists and folds what their CPUs have changed. What a CPU changed in a memcg that is
on no list is folded only if that CPU changes the memcg again.

The lists of a CPU are a tree: ``updated_children`` of a parent is its first updated child, and
``updated_next`` of a child is the next one, or the parent after the last one. It is ``NULL`` for
what is on no list, and not ``NULL`` for the root of a tree that is not empty.

What differs between kernel releases:

- up to 6.15, the tree is one of cgroups (``struct cgroup_rstat_cpu``), for all controllers; since
  6.16, each controller has its own (``struct css_rstat_cpu``);
- since 6.17, a CPU adds the memcg to a lock-less list first, ``cgroup_subsys.lhead``. The next
  flush moves its entries to the tree (``css_process_update_tree()``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from drgn import FaultError, Object, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_member
from memcg_inspect.linux.mm.memcontrol import root_memcg
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Coverage

__all__ = ("read_updated",)

#: The most entries of the lists of one CPU. A longer list is damaged.
_MOST = 1 << 22


def read_updated(
    image: Image, memcgs: Iterable[int], coverage: Coverage
) -> dict[int, frozenset[int]]:
    """
    Read which memcgs are on the lists of each CPU.

    :param memcgs: ``struct mem_cgroup *`` of all memcgs
    :param coverage: counts the CPUs that were read, and those whose lists are unreadable
    :return: ``struct mem_cgroup *`` by possible CPU; CPUs whose lists are unreadable are left out
    """
    updated: dict[int, frozenset[int]] = {}
    lists = _Lists(image)
    try:
        owners = lists.owners(memcgs)
        root = lists.root()
    except FaultError as error:
        coverage.miss("lists of updated memcgs", error.address, str(error))
        return {}
    for cpu, offset in percpu_offsets(image).items():
        try:
            listed = set(lists.waiting(offset)) | set(lists.tree(root, offset))
            updated[cpu] = frozenset(m for node in listed for m in owners.get(node, ()))
            coverage.read += 1
        except FaultError as error:
            coverage.miss("list of updated memcgs", error.address, str(error))
    return updated


class _Lists:
    """
    Reader of the lists. A *node* is a ``struct cgroup_subsys_state *``, up to 6.15 a
    ``struct cgroup *``.
    """

    def __init__(self, image: Image) -> None:
        self._image = image
        self._of_css = has_member(image, "struct cgroup_subsys_state", "rstat_cpu")
        holder = "cgroup_subsys_state" if self._of_css else "cgroup"
        entry = image.type("struct css_rstat_cpu" if self._of_css else "struct cgroup_rstat_cpu")
        self._percpu = offsetof(image.type(f"struct {holder}"), "rstat_cpu")
        self._size = sizeof(entry)
        self._children = offsetof(entry, "updated_children")
        self._next = offsetof(entry, "updated_next")
        self._lnode = self._owner = None
        if entry.has_member("lnode"):
            self._lnode, self._owner = offsetof(entry, "lnode"), offsetof(entry, "owner")

    def root(self) -> int:
        """Return the node of the root memcg."""
        return self._node(root_memcg(self._image))

    def owners(self, memcgs: Iterable[int]) -> Mapping[int, list[int]]:
        """
        Return the memcgs that each node is for.

        Up to 6.15, a cgroup may have several: those that were disabled, but not freed, too.
        """
        owners: dict[int, list[int]] = {}
        for address in memcgs:
            memcg = self._image.pointer("struct mem_cgroup *", address)
            owners.setdefault(self._node(memcg), []).append(address)
        return owners

    def _node(self, memcg: Object) -> int:
        css = memcg.css
        return int(css.address_of_().value_() if self._of_css else css.cgroup.value_())

    def tree(self, root: int, offset: int) -> Iterator[int]:
        """Walk the tree of the CPU with this per-CPU offset, from the root."""
        if not self._entry(root, offset)[1]:
            return  # a flush does not look below
        yield root
        todo, seen = [root], {root}
        while todo:
            parent = todo.pop()
            node = self._entry(parent, offset)[0]
            while node not in (parent, 0):
                if node in seen or len(seen) > _MOST:
                    raise FaultError("the tree of updated memcgs is broken", node)
                seen.add(node)
                yield node
                todo.append(node)
                node = self._entry(node, offset)[1]

    def waiting(self, offset: int) -> Iterator[int]:
        """
        Walk the lock-less list of a CPU.

        Flushing it puts all ancestors of its entries on the tree, too.
        """
        if self._lnode is None or self._owner is None:
            return
        memory = self._image.memory
        lnode = memory.word(self._image.object("memory_cgrp_subsys").lhead.value_() + offset)
        seen: set[int] = set()
        while lnode:
            if lnode in seen or len(seen) > _MOST:
                raise FaultError("the list of updated memcgs is broken", lnode)
            seen.add(lnode)
            yield from self._ancestors(memory.word(lnode - self._lnode + self._owner))
            lnode = memory.word(lnode)

    def _ancestors(self, css: int) -> Iterator[int]:
        parent = offsetof(self._image.type("struct cgroup_subsys_state"), "parent")
        seen: set[int] = set()
        while css and css not in seen:
            seen.add(css)
            yield css
            css = self._image.memory.word(css + parent)

    def _entry(self, node: int, offset: int) -> tuple[int, int]:
        """Return ``updated_children`` and ``updated_next`` of a node."""
        memory = self._image.memory
        entry = memory.read(memory.word(node + self._percpu) + offset, self._size)
        return memory.word_at(entry, self._children), memory.word_at(entry, self._next)
