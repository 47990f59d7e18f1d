# SPDX-License-Identifier: LGPL-2.1-or-later
"""Read the counters of memcgs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from drgn import FaultError, Object

from memcg_inspect.checks.counters import Counters
from memcg_inspect.collect.folds import Folded, Folds
from memcg_inspect.collect.ranges import jobs_of
from memcg_inspect.image.image import Image
from memcg_inspect.image.processes import forked_map
from memcg_inspect.image.progress import STOPPED
from memcg_inspect.linux.mm.memcontrol import nodeinfo
from memcg_inspect.linux.mm.memcontrol_vmstats import Cell, StatArrays, StatReader
from memcg_inspect.linux.mm.mmzone import online_nodes
from memcg_inspect.linux.mm.page_counter import memory_usage, page_counter_usage, page_counters
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Coverage, ImageError, Memcg, Stat

__all__ = (
    "read_counters",
    "read_lruvecs",
    "read_page_counters",
    "read_swap_entries",
    "read_usage",
)

_OF_MEMCG, _OF_NODE = "counters of a memcg", "counters of a memcg on a node"
#: Memcgs times possible CPUs that one process reads as fast as several, which have to be started.
_FEW = 1 << 16
#: Parts for each process: one that is done early can take more of them.
_PARTS_PER_JOB = 4


def read_counters(
    image: Image,
    reader: StatReader,
    memcgs: Mapping[int, Memcg],
    coverage: Coverage,
    only: Iterable[int] | None = None,
    folds: Folds | None = None,
) -> Counters:
    """
    Read the counters of each memcg, and of each memcg on each node.

    If there are many, processes share the memcgs, as they do the pages.

    :param memcgs: all memcgs by ``struct mem_cgroup *``, parents first
    :param coverage: counts what was read
    :param only: ``struct mem_cgroup *`` of the memcgs to read; the counters of the others count as
        unreadable
    :param folds: if given, the arrays that the counters are in are added to it
    """
    wanted = list(memcgs if only is None else only)
    read = _PartReader(image, reader, folds)
    memcg_stats: dict[int, Mapping[str, Stat]] = {}
    lruvec_stats: dict[tuple[int, int], Mapping[str, Stat]] = {}
    nids = set(online_nodes(image))
    for part in _shared(image, read, wanted):
        memcg_stats |= part.memcgs
        lruvec_stats |= part.lruvecs
        nids |= part.nids
        coverage.add(part.coverage)
        if folds is not None and part.folded is not None:
            folds.found.merge(part.folded)
    return Counters(memcgs, memcg_stats, lruvec_stats, nids)


class _Part(NamedTuple):
    """
    Counters of some memcgs.

    :ivar memcgs: by ``struct mem_cgroup *``
    :ivar lruvecs: by (``struct mem_cgroup *``, node)
    :ivar nids: nodes that the memcgs have counters for, whether these were read or not
    :ivar coverage: counts what was read
    :ivar folded: what another process found of flushes
    """

    memcgs: Mapping[int, Mapping[str, Stat]]
    lruvecs: Mapping[tuple[int, int], Mapping[str, Stat]]
    nids: Set[int]
    coverage: Coverage
    folded: Folded | None = None


def _shared(image: Image, read: _PartReader, memcgs: Sequence[int]) -> Iterator[_Part]:
    """Read memcgs in this process, or in several if there are many."""
    # What is not known yet is found here, once, and not in each process.
    is_few = len(memcgs) * len(percpu_offsets(image)) < _FEW
    jobs = 1 if is_few or image.pool is not None else _jobs(image)
    if jobs == 1:
        yield read(memcgs)
        return
    size = max(1, -(-len(memcgs) // (_PARTS_PER_JOB * jobs)))
    parts = [memcgs[start : start + size] for start in range(0, len(memcgs), size)]
    for done, part in enumerate(forked_map(image, jobs)(read.elsewhere, parts), 1):
        image.progress.report("counters", done / len(parts))
        yield part


def _jobs(image: Image) -> int:
    """Return how many processes share an image; 1 if its size cannot be read."""
    try:
        return jobs_of(image)
    except (FaultError, ImageError):
        return 1


class _PartReader:
    """Reads the counters of some memcgs."""

    def __init__(self, image: Image, reader: StatReader, folds: Folds | None) -> None:
        self._image, self._reader, self._folds = image, reader, folds

    def elsewhere(self, memcgs: Sequence[int]) -> _Part:
        """
        Read the counters of some memcgs in another process, which adds nothing to *folds*.

        If the walk was cancelled, nothing is read.
        """
        if self._image.progress.stop:
            coverage = Coverage()
            for address in memcgs:
                coverage.miss(_OF_MEMCG, address, STOPPED)
            return _Part({}, {}, frozenset(), coverage)
        folds = None if self._folds is None else Folds(self._image)
        part = _PartReader(self._image, self._reader, folds)(memcgs)
        return part if folds is None else part._replace(folded=folds.found)

    def __call__(self, memcgs: Sequence[int]) -> _Part:
        image, reader, folds, coverage = self._image, self._reader, self._folds, Coverage()
        memcg_stats: dict[int, Mapping[str, Stat]] = {}
        lruvec_stats: dict[tuple[int, int], Mapping[str, Stat]] = {}
        holders = _holders(image, memcgs, coverage, folds)
        for (address, nid), arrays in _arrays(image, reader, holders):
            try:
                if isinstance(arrays, FaultError):
                    raise arrays
                holder = holders[address, nid]
                if nid is None:
                    memcg_stats[address] = reader.memcg_stats(holder, arrays)
                else:
                    lruvec_stats[address, nid] = reader.lruvec_stats(holder, arrays)
            except FaultError as error:
                what = _OF_MEMCG if nid is None else _OF_NODE
                coverage.miss(what, error.address, str(error))
                if folds is not None:
                    folds.miss(address)
                continue
            coverage.read += 1
            if folds is None:
                continue
            if nid is None:
                folds.add_memcg(address, arrays, reader.event_arrays(arrays))
            else:
                folds.add_lruvec(address, nid, arrays)
        return _Part(
            {address: memcg_stats[address] for address, _ in holders if address in memcg_stats},
            {
                (address, nid): lruvec_stats[address, nid]
                for address, nid in holders
                if nid is not None and (address, nid) in lruvec_stats
            },
            frozenset(nid for _, nid in holders if nid is not None),
            coverage,
        )


def _holders(
    image: Image, memcgs: Iterable[int], coverage: Coverage, folds: Folds | None
) -> dict[Cell, Object]:
    """Return ``struct mem_cgroup *`` and ``struct mem_cgroup_per_node *`` of memcgs."""

    def missed(error: FaultError) -> None:
        coverage.miss(_OF_NODE, error.address, str(error))
        if folds is not None:
            folds.miss(address)

    holders: dict[Cell, Object] = {}
    for address in memcgs:
        memcg = holders[address, None] = image.pointer("struct mem_cgroup *", address)
        holders |= {(address, nid): pn for nid, pn in nodeinfo(image, memcg, missed)}
    return holders


def _arrays(
    image: Image, reader: StatReader, holders: Mapping[Cell, Object]
) -> Iterator[tuple[Cell, StatArrays | FaultError]]:
    if not image.is_moving:
        yield from reader.all_arrays(holders)
        return
    # What is flushed between the reads of a counter is taken for a change of it.
    for cell, holder in holders.items():
        yield from reader.all_arrays({cell: holder})


def read_usage(image: Image, memcgs: Iterable[int], coverage: Coverage) -> dict[int, int]:
    """
    Read the page counters of memcgs, ``memory.usage``, in pages.

    :param memcgs: ``struct mem_cgroup *``
    :return: by ``struct mem_cgroup *``, without those that could not be read
    """
    usage = {}
    for address in memcgs:
        try:
            usage[address] = memory_usage(image.pointer("struct mem_cgroup *", address))
        except FaultError as error:
            coverage.miss("page counter", error.address, str(error))
    return usage


def read_page_counters(
    image: Image, memcgs: Iterable[int], coverage: Coverage
) -> dict[tuple[int, str], int]:
    """
    Read the page counters in use other than ``memory``, in pages.

    :param memcgs: ``struct mem_cgroup *``
    :return: by (``struct mem_cgroup *``, member), without those that could not be read
    """
    found = {}
    for address in memcgs:
        memcg = image.pointer("struct mem_cgroup *", address)
        try:
            for name in page_counters(image):
                if name != "memory":
                    found[address, name] = page_counter_usage(memcg, name)
        except FaultError as error:
            coverage.miss("page counter", error.address, str(error))
    return found


def read_swap_entries(
    image: Image, memcgs: Iterable[int], ids: Mapping[int, int], coverage: Coverage
) -> dict[int, int]:
    """
    Return the number of swap entries that are charged to each memcg.

    :param memcgs: ``struct mem_cgroup *``
    :param ids: number of swap entries by the ID that they record
    :return: by ``struct mem_cgroup *``, without memcgs whose IDs could not be read
    """
    entries = {}
    for address in memcgs:
        try:
            # The ID of a removed memcg is 0 when nothing refers to it any more.
            number = int(image.pointer("struct mem_cgroup *", address).id.id)
        except FaultError as error:
            coverage.miss("ID of a memcg", error.address, str(error))
            continue
        entries[address] = ids.get(number, 0) if number else 0
    return entries


def read_lruvecs(
    image: Image, memcgs: Iterable[int], coverage: Coverage
) -> dict[tuple[int, int], Object]:
    """
    Return the ``mem_cgroup_per_node`` of memcgs.

    :param memcgs: ``struct mem_cgroup *``
    :return: ``struct mem_cgroup_per_node *`` by (``struct mem_cgroup *``, node)
    """

    def missed(error: FaultError) -> None:
        coverage.miss("nodes of a memcg", error.address, str(error))

    return {
        (address, nid): pn
        for address in memcgs
        for nid, pn in nodeinfo(image, image.pointer("struct mem_cgroup *", address), missed)
    }
