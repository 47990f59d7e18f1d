# SPDX-License-Identifier: LGPL-2.1-or-later
"""Read the counters of memcgs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drgn import FaultError, Object

from memcg_inspect.checks.counters import Counters
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import memory_usage, nodeinfo
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.model import Coverage, Memcg, Stat

__all__ = ("read_counters", "read_lruvecs", "read_usage")


def read_counters(
    image: Image,
    reader: StatReader,
    memcgs: Mapping[int, Memcg],
    coverage: Coverage,
    only: Iterable[int] | None = None,
) -> Counters:
    """
    Read the counters of each memcg, and of each memcg on each node.

    :param memcgs: all memcgs by ``struct mem_cgroup *``, parents first
    :param coverage: counts what was read
    :param only: ``struct mem_cgroup *`` of the memcgs to read; the counters of the others count as
        unreadable
    """
    memcg_stats: dict[int, dict[str, Stat]] = {}
    lruvec_stats: dict[tuple[int, int], dict[str, Stat]] = {}

    def missed(error: FaultError) -> None:
        coverage.miss("counters of a memcg on a node", error.address, str(error))

    for address in memcgs if only is None else only:
        memcg = Object(image.prog, "struct mem_cgroup *", address)
        try:
            memcg_stats[address] = reader.memcg(memcg)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("counters of a memcg", error.address, str(error))
        for nid, pn in nodeinfo(image, memcg, missed):
            try:
                lruvec_stats[address, nid] = reader.lruvec(pn)
                coverage.read += 1
            except FaultError as error:
                missed(error)
    return Counters(memcgs, memcg_stats, lruvec_stats)


def read_usage(image: Image, memcgs: Iterable[int], coverage: Coverage) -> dict[int, int]:
    """
    Read the page counters of memcgs, ``memory.usage``, in pages.

    :param memcgs: ``struct mem_cgroup *``
    :return: by ``struct mem_cgroup *``, without those that could not be read
    """
    usage = {}
    for address in memcgs:
        try:
            usage[address] = memory_usage(Object(image.prog, "struct mem_cgroup *", address))
        except FaultError as error:
            coverage.miss("page counter", error.address, str(error))
    return usage


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
        for nid, pn in nodeinfo(image, Object(image.prog, "struct mem_cgroup *", address), missed)
    }
