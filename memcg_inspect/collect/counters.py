# SPDX-License-Identifier: LGPL-2.1-or-later
"""Read the counters of memcgs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drgn import FaultError, Object

from memcg_inspect.checks.counters import Counters
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import nodeinfo
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.model import Coverage, Memcg, Stat

__all__ = ("read_counters",)


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
