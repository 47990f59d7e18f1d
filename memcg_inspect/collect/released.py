# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Memcgs that are being freed
---------------------------

A released memcg is in no list (``css_release_work_fn()``). It can hold references to obj_cgroups
until a worker frees it. It is found in the slabs that can contain it.

:class:`Pending` finds what will free them: a work item that is queued, or that a worker runs, or an
RCU callback that queues one. A memcg that nothing will free is a leak. BPF maps are freed in the
same way; see :mod:`~memcg_inspect.collect.unlisted_maps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from drgn import FaultError, Object, Type, container_of, offsetof, sizeof

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import constant
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.kernel.rcu import queued_callbacks
from memcg_inspect.linux.kernel.workqueue import is_pending, works_of
from memcg_inspect.linux.lib.list import OnFault
from memcg_inspect.linux.mm.memcontrol import has_node_objcgs, nodeinfo
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.mmzone import possible_nodes
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.linux.mm.slub import FreeObjects
from memcg_inspect.model import Coverage
from memcg_inspect.model_freeing import Transient

__all__ = ("QUEUED_WORK", "RELEASED", "Pending", "ReleasedReader", "queued_callback")

#: :attr:`~memcg_inspect.model_freeing.Transient.what` of released memcgs.
RELEASED = "memcg that was released"
#: What will free an object.
QUEUED_WORK = "its work item is queued or running"
#: Functions of the work items that free memcgs and BPF maps.
_FREEING = ("css_release_work_fn", "css_free_rwork_fn", "bpf_map_free_deferred")
#: RCU callbacks of BPF maps; 7.0 has one for all grace periods.
_MAP_CALLBACKS = ("bpf_map_free_rcu_gp", "bpf_map_free_mult_rcu_gp")
#: ``CSS_RELEASED`` of include/linux/cgroup-defs.h, for images whose types lack the anonymous enum.
CSS_RELEASED = 4

_SOCK = "MEMCG_SOCK"
#: ``WORK_STRUCT_PENDING``.
_PENDING = 1


class ReleasedReader:
    """
    Finds memcgs that are being freed in slabs.

    :ivar faults: why not all work items that free memcgs are known. A memcg that is being freed may
        hold a reference to its parent that is not found then.
    :ivar coverage: counts the objects that are unreadable
    """

    def __init__(self, image: Image, slabs: SlabReader, memcgs: Iterable[int]) -> None:
        self.image = image
        self.memory = image.memory
        self.slabs = slabs
        self.memcgs = {untagged(image, memcg) for memcg in memcgs}
        memcg = image.type("struct mem_cgroup")
        self._memcg_size = sizeof(memcg) + len(possible_nodes(image)) * self.memory.word_size
        self._subsys = offsetof(memcg, "css.ss")
        self._parent = offsetof(memcg, "css.parent")
        self._rwork = _offset(memcg, "css.destroy_rwork.work.data")
        self._released = constant(image, "CSS_RELEASED") or CSS_RELEASED
        self._memory_subsys = image.object("memory_cgrp_subsys").address_
        self.faults: list[FaultError] = []
        self.coverage = Coverage()
        self._being_freed = _running(image, "css_free_rwork_fn", self.faults.append)
        self._free = FreeObjects(image, slabs)
        self._missed: set[int] = set()

    def read(self, slab: Slab) -> Iterator[tuple[int, Transient]]:
        """
        Find memcgs of a slab that were released and are not freed yet.

        :return: (``struct obj_cgroup *`` to which the memcg can hold a reference, the memcg), also
            with 0 instead of the obj_cgroup
        """
        for number, address in self._old_memcgs(slab, self.coverage):
            with self._counted(address):
                yield from self._released_memcg(slab, number, address)

    def children(self, slab: Slab) -> Iterator[int]:
        """
        Find memcgs of a slab that were released and are not freed yet.

        ``css_release_work_fn()`` removes a memcg from the list of its parent's children. It holds
        its reference to the parent until ``css_free_rwork_fn()`` has run.

        :return: ``struct mem_cgroup *`` of the parents
        """
        if self._rwork is None:
            return
        for _, address in self._old_memcgs(slab, Coverage()):
            with self._counted(address):
                if self._holds_parent(address):
                    yield self.memory.word(address + self._parent)

    @contextmanager
    def _counted(self, address: int) -> Iterator[None]:
        """Count a memcg that is being freed if it cannot be read."""
        try:
            yield
        except FaultError as error:
            # An object that is used again can point anywhere.
            if self.image.is_moving or address in self._missed:
                return
            if self._may_be_released(address):
                self._missed.add(address)
                self.coverage.miss("memcg that is being freed", error.address, str(error))

    def _old_memcgs(self, slab: Slab, coverage: Coverage) -> Iterator[tuple[int, int]]:
        """
        Find objects of a slab that are, or were, memcgs that are on no list.

        :param coverage: counts those that are unreadable
        :return: (index in the slab, address)
        """
        if not self.may_read(slab.cache):
            return
        for number, address in enumerate(self.slabs.objects(slab)):
            if address in self.memcgs:
                continue
            try:
                subsys = self.memory.word(address + self._subsys)
            except FaultError as error:
                # On a running kernel, memory that was freed can lead to any error.
                if not self.image.is_moving:
                    coverage.miss("possible memcg", address, str(error))
                continue
            if subsys == self._memory_subsys:
                yield number, address

    def _holds_parent(self, address: int) -> bool:
        """Return whether a memcg on no list was not freed; see :meth:`children`."""
        # What was freed is not queued.
        if self._rwork is not None and self.memory.word(address + self._rwork) & _PENDING:
            return True
        # css_release_work_fn() sets the flag before it queues the work item. That begins with
        # percpu_ref_exit(), which clears the pointer.
        css = self._memcg(address).css
        if css.refcnt.data:
            return bool(int(css.flags) & self._released)
        work = css.destroy_rwork.work.address_of_().value_()
        return untagged(self.image, work) in self._being_freed

    def may_read(self, cache: SlabCache) -> bool:
        """Return whether slabs of a cache may have memcgs."""
        name, size = cache.name, cache.object_size
        if name == "mem_cgroup":
            return True
        # Up to 6.15 memcgs come from kmalloc(), charged or not.
        is_general = name.startswith("kmalloc-")
        return is_general and self._memcg_size <= size < 2 * self._memcg_size

    def _released_memcg(
        self, slab: Slab, number: int, address: int
    ) -> Iterator[tuple[int, Transient]]:
        is_allocated = self._is_allocated(slab, number)
        if is_allocated is False:
            return
        memcg = self._memcg(address)
        transient = Transient(RELEASED, address, unsure=is_allocated is None)
        # css_free_rwork_fn() begins with percpu_ref_exit(), which clears the pointer. So this
        # memcg was not freed, not even into a sheaf of its cache.
        if is_allocated and int(memcg.css.flags) & self._released and memcg.css.refcnt.data:
            yield 0, transient
        for objcg in self._original_objcgs(memcg):
            yield objcg, transient

    def _memcg(self, address: int) -> Object:
        return self.image.pointer("struct mem_cgroup *", address)

    def _original_objcgs(self, memcg: Object) -> Iterator[int]:
        holders = (
            [pn for _, pn in nodeinfo(self.image, memcg)]
            if has_node_objcgs(self.image)
            else [memcg]
        )
        for holder in holders:
            if holder.type_.type.has_member("orig_objcg") and holder.orig_objcg:
                yield holder.orig_objcg.value_()

    def _may_be_released(self, address: int) -> bool:
        try:
            return bool(int(self._memcg(address).css.flags) & self._released)
        except FaultError:
            return True

    def _is_allocated(self, slab: Slab, number: int) -> bool | None:
        """Return whether an object is in use; ``None`` if not all free objects could be read."""
        # A free object may still have the contents of the memcg that it was.
        try:
            return not self._free.is_free(slab, number)
        except FaultError:  # the free list of a slab that a CPU is changing can be inconsistent
            return False if self.image.is_moving else None


def _addresses(image: Image, names: Iterable[str]) -> Iterator[int]:
    for name in names:
        with suppress(UnknownKernelError):
            yield image.symbol(name).address


def _offset(type_: Type, member: str) -> int | None:
    try:
        return int(offsetof(type_, member))
    except LookupError:
        return None


def _running(image: Image, name: str, on_fault: OnFault) -> frozenset[int]:
    """Return the work items of a function that are queued or running, as far as they are known."""
    found: set[int] = set()
    try:
        for work in works_of(image, image.symbol(name).address, on_fault):
            found.add(untagged(image, work.value_()))
    except FaultError as error:
        on_fault(error)
    except UnknownKernelError:
        pass
    return frozenset(found)


def queued_callback(cpu: int) -> str:
    """Return what will free an object whose RCU callback is queued on a CPU."""
    return f"its RCU callback is queued on CPU {cpu}"


class Pending:
    """
    Finds what will free objects that are being freed.

    On a running kernel lists change while they are read. There, a work item that is pending counts
    as queued.
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self._whole = True
        self._callbacks: dict[int, int] = {}
        try:
            queued = queued_callbacks(image)
            self._callbacks = {untagged(image, head): cpu for head, cpu in queued.items()}
        except (FaultError, UnknownKernelError):
            self._whole = False
        self._works = {work for name in _FREEING for work in self._works_of(name)}
        self._map_callbacks = set(_addresses(image, _MAP_CALLBACKS))

    def _works_of(self, name: str) -> Iterator[int]:
        try:
            function = self.image.symbol(name).address
            for work in works_of(self.image, function, self._missed):
                yield untagged(self.image, work.value_())
        except UnknownKernelError:
            self._whole = False

    def _missed(self, error: FaultError) -> None:
        self._whole = False

    def of(self, transient: Transient) -> Transient:
        """Return an object that is being freed, with what will free it."""
        try:
            if transient.what == RELEASED:
                return self._of_memcg(transient)
            return self._of_map(transient)
        except (FaultError, AttributeError):
            return transient._replace(unsure=True)

    def _of_memcg(self, transient: Transient) -> Transient:
        memcg = self.image.pointer("struct mem_cgroup *", transient.address)
        css = memcg.css
        works = [css.destroy_work, css.destroy_rwork.work]
        freed_by = self._freed_by(works, css.destroy_rwork.rcu)
        # The bit stays set until the work item runs, also while the callback is in no list because
        # rcu_do_batch() is calling it.
        unsure = transient.unsure or not self._whole or any(is_pending(work) for work in works)
        found = transient._replace(freed_by=freed_by, unsure=unsure)
        return found if freed_by is not None else self._with_charges(found, memcg)

    def _with_charges(self, transient: Transient, memcg: Object) -> Transient:
        """Return a memcg that nothing frees with what the rows of its parent need of it."""
        try:
            stats = StatReader(self.image, [_SOCK]).memcg(memcg)
            return transient._replace(
                parent=container_of(memcg.css.parent, "struct mem_cgroup", "css").value_(),
                swap_id=int(memcg.id.id),
                sock_pages=stats[_SOCK].state if _SOCK in stats else 0,
            )
        except (FaultError, AttributeError):
            return transient  # it is a leak all the same

    def _of_map(self, transient: Transient) -> Transient:
        bpf_map = self.image.pointer("struct bpf_map *", transient.address)
        freed_by = self._freed_by([bpf_map.work], bpf_map.rcu)
        # A map can also wait for a grace period of RCU tasks, whose callbacks are not read.
        waits = bpf_map.rcu.func.value_() in self._map_callbacks
        return transient._replace(freed_by=freed_by, unsure=waits or not self._whole)

    def _freed_by(self, works: Sequence[Object], callback: Object) -> str | None:
        for work in works:
            if untagged(self.image, work.address_of_().value_()) in self._works:
                return QUEUED_WORK
            if self.image.is_moving and is_pending(work):
                return "its work item is pending"
        cpu = self._callbacks.get(untagged(self.image, callback.address_of_().value_()))
        return None if cpu is None else queued_callback(cpu)
