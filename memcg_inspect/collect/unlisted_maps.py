# SPDX-License-Identifier: LGPL-2.1-or-later
"""
BPF maps that are being created or freed
----------------------------------------

``map_create()`` gives a map its allocators, and their obj_cgroups, before it gives it an ID.
``bpf_map_free_id()`` takes the ID before a worker frees the map. In between, the map is not in
``map_idr``, and it holds references to obj_cgroups.

:class:`UnlistedMaps` finds such maps in the slabs of the pass over all pages. A map with many
elements can be larger than the objects of any cache: :func:`with_map_makers` finds it by the work
item or the RCU callback that will free it. It also finds the tasks that create maps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from drgn import FaultError, Object, container_of, offsetof, sizeof

from memcg_inspect.checks.identities import references
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect.released import QUEUED_WORK, queued_callback
from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import has_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.arch.processor import untagged
from memcg_inspect.linux.kernel.bpf import map_objcgs, types_with_allocators
from memcg_inspect.linux.kernel.rcu import queued_callbacks
from memcg_inspect.linux.kernel.stacktrace_refs import stack_refs
from memcg_inspect.linux.kernel.workqueue import works_of
from memcg_inspect.linux.lib.list import idr_entries
from memcg_inspect.linux.mm.slab import Slab, SlabCache, SlabReader
from memcg_inspect.model import Coverage, StackRef
from memcg_inspect.model_freeing import Transient
from memcg_inspect.report import Row

__all__ = ("UNLISTED_MAP", "UnlistedMaps", "with_map_makers")

#: :attr:`~memcg_inspect.model_freeing.Transient.what` of these maps.
UNLISTED_MAP = "BPF map without an ID"
#: Bytes of an ``enum bpf_map_type``.
_ENUM = 4
#: Functions that create maps, and that drop the last reference to one. Some may be inlined.
_USES = frozenset(
    {"map_create", "__sys_bpf", "bpf_map_put", "bpf_map_put_with_uref", "bpf_map_release"}
)


class UnlistedMaps:
    """
    Finds BPF maps without an ID in slabs.

    :ivar fault: why maps cannot be told from other objects
    :ivar coverage: counts the objects that are unreadable
    """

    def __init__(self, image: Image, slabs: SlabReader) -> None:
        self._image = image
        self._memory = image.memory
        self._slabs = slabs
        self.fault: FaultError | None = None
        self.coverage = Coverage()
        try:
            self._operations = _operations(image)
        except FaultError as error:
            self._operations, self.fault = frozenset[int](), error
        if self._operations:
            self._listed = _listed(image)
            self._size = sizeof(image.type("struct bpf_map"))
            self._types = types_with_allocators(image)
            # The first member until 6.17; a hash of the map is since 6.18.
            self._ops = offsetof(image.type("struct bpf_map"), "ops")
            self._type = offsetof(image.type("struct bpf_map"), "map_type")

    def read(self, slab: Slab) -> Iterator[tuple[int, Transient]]:
        """
        Find the maps of a slab that have no ID.

        :return: (``struct obj_cgroup *`` to which the map can hold references, the map)
        """
        if not slab.charged or not self.may_read(slab.cache):
            return
        with suppress(FaultError):
            for obj in self._slabs.charged_objects(slab):
                try:
                    yield from self._of_object(obj.address)
                except FaultError as error:
                    if not self._image.is_moving:
                        self.coverage.miss("possible BPF map", obj.address, str(error))

    def may_read(self, cache: SlabCache) -> bool:
        """Return whether slabs of a cache may have maps."""
        return (
            bool(self._operations)
            and cache.name.startswith("kmalloc-cg-")
            and cache.object_size >= self._size
        )

    def _of_object(self, address: int) -> list[tuple[int, Transient]]:
        ops = self._memory.word(address + self._ops)
        if address in self._listed or not self._may_be_map(address, ops):
            return []
        bpf_map = self._image.pointer("struct bpf_map *", address)
        try:
            return [] if _has_id(bpf_map) else list(_transients(self._image, bpf_map))
        except FaultError:
            if ops:
                raise
            return []  # anything can look like a map without operations, data of a user too

    def _may_be_map(self, address: int, ops: int) -> bool:
        if ops:
            return ops in self._operations
        # map_create() sets the operations after bpf_map_init_from_attr() has set the type, and the
        # allocators have been made. Tasks tell whether it is a map: see with_map_makers().
        data = self._memory.read(address + self._type, _ENUM)
        return int.from_bytes(data, self._memory.order) in self._types


def _operations(image: Image) -> frozenset[int]:
    """
    Return all ``struct bpf_map_ops *``. Each BPF map has one of them.

    :raises drgn.FaultError: if they cannot be read
    """
    if not has_type(image, "struct bpf_map"):
        return frozenset()
    try:
        return frozenset(ops.value_() for ops in image.object("bpf_map_types") if ops)
    except UnknownKernelError:
        return frozenset()


def _listed(image: Image) -> set[int]:
    # The reader of maps counts what is unreadable.
    maps = idr_entries(image, "struct bpf_map", image.object("map_idr"), lambda error: None)
    return {untagged(image, bpf_map.value_()) for bpf_map in maps}


def _has_id(bpf_map: Object) -> bool:
    # bpf_map_put() frees a map without references. bpf_map_free_id() takes its ID.
    return bool(int(bpf_map.refcnt.counter) > 0 and int(bpf_map.id))


def _transients(image: Image, bpf_map: Object) -> Iterator[tuple[int, Transient]]:
    for objcg, number in Counter(map_objcgs(image, bpf_map)).items():
        yield objcg, Transient(UNLISTED_MAP, bpf_map.value_(), number)


def with_map_makers(image: Image, snapshot: Snapshot, rows: Iterable[Row]) -> Snapshot:
    """
    Return a snapshot with the tasks that create maps, and with maps that are in no slab.

    They are searched only if references to an obj_cgroup were not found.

    :param rows: rows of the snapshot without them
    """
    if not any(
        row.identity == references.CHECK.name and row.status == "differs" and row.off > 0
        for row in rows
    ):
        return snapshot
    try:
        found = defaultdict(list, {o: list(some) for o, some in snapshot.transients.items()})
        known = {t.address for some in found.values() for t in some if t.what == UNLISTED_MAP}
        for bpf_map, why in _being_freed(image):
            if bpf_map.value_() not in known:
                known.add(bpf_map.value_())
                for objcg, transient in _transients(image, bpf_map):
                    found[objcg].append(transient._replace(freed_by=why))
        return replace(snapshot, transients=_with_makers(image, found))
    except FaultError:
        return snapshot  # what could not be read explains nothing
    except Exception:
        # On a running kernel, memory that was freed and reused can lead to any error.
        if not image.is_moving:
            raise
        return snapshot


def _being_freed(image: Image) -> Iterator[tuple[Object, str]]:
    """Return each ``struct bpf_map *`` that is queued to be freed, and what will free it."""
    try:
        function = image.symbol("bpf_map_free_deferred").address
        for work in works_of(image, function, lambda error: None):
            yield container_of(work, "struct bpf_map", "work"), QUEUED_WORK
        function = image.symbol("bpf_map_free_rcu_gp").address
        at = offsetof(image.type("struct callback_head"), "func")
        for address, cpu in queued_callbacks(image).items():
            if image.memory.word(address + at) == function:
                head = image.pointer("struct callback_head *", address)
                yield container_of(head, "struct bpf_map", "rcu"), queued_callback(cpu)
    except UnknownKernelError:
        return


def _with_makers(
    image: Image, found: Mapping[int, Sequence[Transient]]
) -> dict[int, list[Transient]]:
    """Return the objects, with the tasks that create or free those that nothing else frees."""
    wanted = {
        transient.address
        for some in found.values()
        for transient in some
        if transient.what == UNLISTED_MAP and transient.freed_by is None
    }
    makers = stack_refs(image, wanted, Coverage()) if wanted else {}
    return {
        objcg: [_made(transient, makers.get(transient.address, ())) for transient in some]
        for objcg, some in found.items()
    }


def _made(transient: Transient, tasks: Sequence[StackRef]) -> Transient:
    for task in tasks:
        function = next((name for name in task.functions if name in _USES), None)
        if function is not None:
            return transient._replace(freed_by=f"{task.comm} ({task.pid}) is in {function}")
    # A register that is not known may point to it.
    unsure = transient.unsure or any(not task.functions for task in tasks)
    return transient._replace(unsure=unsure)
