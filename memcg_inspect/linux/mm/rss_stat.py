# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Resident pages of processes
---------------------------

Mirrors ``mm_struct.rss_stat`` and ``get_mm_counter()`` of :linux:`include/linux/mm.h`. A counter is
a central value that is cheap to read, and parts that CPUs or threads have not added to it yet:

- since commit f1a7941243c1 ("mm: convert mm's rss stats into percpu_counter") (in v6.2), each
  counter is a ``struct percpu_counter``;
- up to 6.1, each counter is an ``atomic_long_t``, and threads hold changes in
  ``task_struct.rss_stat`` (``SPLIT_RSS_COUNTING``);
- with a patch that is not merged, each counter is a ``struct nodecounter``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from drgn import FaultError, TypeKind, offsetof, sizeof

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import constant, has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.sched import Thread
from memcg_inspect.linux.lib.nodecounter import nodecounter_bound, nodecounter_parts
from memcg_inspect.linux.lib.percpu_counter import percpu_counter_bound, percpu_counter_parts
from memcg_inspect.linux.mm.mmzone import mem_map
from memcg_inspect.model import Coverage, ImageError

__all__ = (
    "ITEMS",
    "RssCounter",
    "counts_by_task",
    "per_node_bound",
    "read_rss",
    "rss_bounds",
)

#: Name of each item, by enumerator of ``MM_FILEPAGES`` etc.
ITEMS = {
    "MM_FILEPAGES": "file",
    "MM_ANONPAGES": "anon",
    "MM_SWAPENTS": "swapents",
    "MM_SHMEMPAGES": "shmem",
}

#: The most faults whose changes a thread can hold (up to 6.1). ``check_sync_rss_stat()`` adds the
#: changes of a thread to the counter at the start of a fault, if more than
#: ``TASK_RSS_EVENTS_THRESH`` faults came before. That makes two more.
_FAULTS = 64 + 2
#: ``fault_around_bytes`` where it is a constant (without ``CONFIG_DEBUG_FS``).
_FAULT_AROUND_BYTES = 65536
#: Batch of per-node counters, as proposed for large machines in 2025 (not merged).
_NODE_BATCH = 32


class RssCounter(NamedTuple):
    """
    One counter of a ``struct mm_struct``, in pages.

    :ivar folded: the central value; may be negative
    :ivar parts: sum of what CPUs or threads have not added to it yet; ``None`` if it is unreadable
    """

    folded: int
    parts: int | None

    @property
    def approximate(self) -> int:
        """``get_mm_counter()``: the central value, or 0 if that is negative."""
        return max(self.folded, 0)

    @property
    def exact(self) -> int | None:
        """``get_mm_counter_sum()``, but not raised to 0: a correct counter is never negative."""
        return None if self.parts is None else self.folded + self.parts


@per_image
def _type_of_counters(image: Image) -> str | None:
    """Return the name of the structure that each counter is; ``None`` if it is none."""
    # Commit f1a7941243c1 ("mm: convert mm's rss stats into percpu_counter") (in v6.2).
    type_ = member_type(image.type("struct mm_struct"), "rss_stat").unaliased()
    return type_.type.tag if type_.kind == TypeKind.ARRAY else None


@per_image
def _slots(image: Image) -> dict[str, int]:
    slots = {item: constant(image, name) for name, item in ITEMS.items()}
    missing = [item for item, slot in slots.items() if slot is None]
    if missing:
        raise ImageError(f"this kernel does not count {missing[0]} pages of processes")
    return {item: slot for item, slot in slots.items() if slot is not None}


@per_image
def counts_by_task(image: Image) -> bool:
    """Return whether tasks hold parts of the counters (``SPLIT_RSS_COUNTING``, up to 6.1)."""
    return has_member(image, "struct task_struct", "rss_stat")


def rss_bounds(image: Image, threads: int) -> dict[str, int | None]:
    """
    Return how far :attr:`RssCounter.approximate` can be from :attr:`RssCounter.exact`.

    Since 6.2, each CPU holds less than ``percpu_counter_batch``, or each node less than
    ``NODECOUNTER_BATCH``. Up to 6.1, each thread holds the
    changes of a limited number of faults. A fault maps one page, or up to ``fault_around_bytes``
    of a file. (Drivers that map pages outside of faults exceed that bound.)

    :param threads: number of tasks that use the ``mm_struct``
    :return: pages by item, in :data:`ITEMS`; ``None`` where the bound is not known
    """
    kind = _type_of_counters(image)
    if kind == "nodecounter":
        return dict.fromkeys(ITEMS.values(), nodecounter_bound(image))
    if kind is not None:
        try:
            return dict.fromkeys(ITEMS.values(), percpu_counter_bound(image))
        except UnknownKernelError:
            return dict.fromkeys(ITEMS.values(), None)
    if not counts_by_task(image):
        return dict.fromkeys(ITEMS.values(), 0)
    bounds: dict[str, int | None] = dict.fromkeys(ITEMS.values(), _FAULTS * threads)
    try:
        around = int(image.object("fault_around_bytes").value_())
    except UnknownKernelError:
        around = _FAULT_AROUND_BYTES
    except FaultError:
        return bounds | {"file": None, "shmem": None}
    file_bound = _FAULTS * max(around >> mem_map(image).page_shift, 1) * threads
    return bounds | {"file": file_bound, "shmem": file_bound}


def per_node_bound(nodes: int) -> int:
    """Return how far the central value could be off if nodes had atomic counters, in pages."""
    return _NODE_BATCH * nodes


def read_rss(
    image: Image, threads: Iterable[Thread], coverage: Coverage, is_all: bool = True
) -> dict[int, dict[str, RssCounter]]:
    """
    Read the counters of all processes.

    :param threads: all tasks
    :param coverage: counts the ``mm_struct`` that were read, and what is unreadable
    :param is_all: whether *threads* has every task; if not, ``parts`` that a missing task may
        hold are ``None``
    :return: by ``struct mm_struct *`` and item, in :data:`ITEMS`; unreadable ones are left out
    """
    members = image.type("struct mm_struct")
    offset = offsetof(members, "rss_stat")
    size = sizeof(member_type(members, "rss_stat"))
    memory, data = image.memory, {}
    # By mm_struct, what each of its threads holds.
    held: dict[int, list[Sequence[int]]] = {}
    for thread in threads:
        if thread.mm:
            held.setdefault(thread.mm, []).append(thread.rss)
    for mm in held:
        try:
            data[mm] = memory.read(mm + offset, size)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("counters of a process", error.address, str(error))
    kind = _type_of_counters(image)
    if kind is not None:
        read = _by_node if kind == "nodecounter" else _percpu
        return read(image, data, coverage)
    if not is_all:
        _drop_partial(image, held)
    return _atomic(image, data, held)


def _drop_partial(image: Image, held: dict[int, list[Sequence[int]]]) -> None:
    # A task that could not be read may hold parts of a counter, unless as many tasks were read as
    # mm_users counts.
    for mm, parts in held.items():
        try:
            users = int(image.pointer("struct mm_struct *", mm).mm_users.counter)
        except FaultError:
            users = -1
        if users != len(parts):
            parts.clear()


def _percpu(
    image: Image, data: Mapping[int, bytes], coverage: Coverage
) -> dict[int, dict[str, RssCounter]]:
    counter, memory = image.type("struct percpu_counter"), image.memory
    size, count = sizeof(counter), offsetof(counter, "count")
    # Without CONFIG_SMP there are no parts.
    has_parts = counter.has_member("counters")
    at = offsetof(counter, "counters") if has_parts else 0
    slots = _slots(image)
    pointers = {
        (mm, item): memory.word_at(raw, slot * size + at)
        for mm, raw in data.items()
        for item, slot in slots.items()
    }
    parts = percpu_counter_parts(image, pointers.values()) if has_parts else {}
    found: dict[int, dict[str, RssCounter]] = {mm: {} for mm in data}
    for (mm, item), pointer in pointers.items():
        start = slots[item] * size + count
        value = int.from_bytes(data[mm][start : start + 8], memory.order, signed=True)
        part = parts.get(pointer) if has_parts else 0
        if part is None:
            coverage.miss("per-CPU counters of a process", pointer, "not in the image")
        found[mm][item] = RssCounter(value, part)
    return found


def _by_node(
    image: Image, data: Mapping[int, bytes], coverage: Coverage
) -> dict[int, dict[str, RssCounter]]:
    counter, memory, slots = image.type("struct nodecounter"), image.memory, _slots(image)
    size, count, at = (sizeof(counter), offsetof(counter, "count"), offsetof(counter, "nodes"))
    # The counters of an mm_struct are made together, in the order of the items.
    pointers = {mm: memory.word_at(raw, at) for mm, raw in data.items()}
    parts = nodecounter_parts(image, [(pointers[mm], len(raw) // size) for mm, raw in data.items()])
    found: dict[int, dict[str, RssCounter]] = {}
    for mm, raw in data.items():
        sums = parts.get(pointers[mm])
        if sums is None:
            coverage.miss("per-node counters of a process", pointers[mm], "not in the image")
        found[mm] = {
            item: RssCounter(
                memory.signed_at(raw, slot * size + count),
                sums[slot] if sums is not None and slot < len(sums) else None,
            )
            for item, slot in slots.items()
        }
    return found


def _atomic(
    image: Image, data: Mapping[int, bytes], held: Mapping[int, Sequence[Sequence[int]]]
) -> dict[int, dict[str, RssCounter]]:
    memory, slots = image.memory, _slots(image)
    return {
        mm: {
            item: RssCounter(
                memory.signed_at(raw, slot * memory.word_size),
                sum(rss[slot] for rss in held[mm] if rss) if held[mm] else None,
            )
            for item, slot in slots.items()
        }
        for mm, raw in data.items()
    }
