# SPDX-License-Identifier: LGPL-2.1-or-later
"""Recovery of obj_cgroups that were not found because part of the lists could not be read."""

from __future__ import annotations

from collections.abc import Container, Mapping, Set

from memcg_inspect.collect.partial import Partial
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import has_node_objcgs, recover_objcgs
from memcg_inspect.linux.mm.percpu import PercpuReader
from memcg_inspect.model import Coverage, Memcg, Objcg

__all__ = ("recover_for_charges", "recover_for_percpu")


def recover_for_charges(
    image: Image,
    total: Partial,
    memcgs: Mapping[int, Memcg],
    objcgs: Container[int],
    held: Set[int],
) -> dict[int, Objcg]:
    """
    Read the unknown obj_cgroups that charges and references point to.

    :param total: result of the pass over all page frames
    :param memcgs: all memcgs that were read, by ``struct mem_cgroup *``
    :param objcgs: ``struct obj_cgroup *`` that were read
    :param held: ``struct obj_cgroup *`` that stocks and references point to
    :return: by ``struct obj_cgroup *``
    """
    on_lru = has_node_objcgs(image)
    not_objcgs = ("sock",) if on_lru else ("sock", "lru")
    wanted = {entry.payer for entry, _ in total.ledger if entry.kind not in not_objcgs} | held
    unknown = {o for o in wanted if o and o not in memcgs and o not in objcgs}
    is_whole = not total.coverage["memcgs"].unreadable
    return recover_objcgs(image, memcgs, is_whole, unknown, total.coverage["objcgs"])


def recover_for_percpu(
    image: Image, objcgs: Mapping[int, Objcg], coverage: Coverage
) -> dict[int, Objcg]:
    """
    Read the unknown obj_cgroups that percpu allocations point to.

    On kernels that account by node, they are needed to find the obj_cgroups of other nodes.

    :param objcgs: by ``struct obj_cgroup *``
    :return: by ``struct obj_cgroup *``
    """
    reader = PercpuReader(image)
    found = {area.objcg for chunk in reader.chunks() for area in reader.charged(chunk)}
    memcgs = {objcg.memcg for objcg in objcgs.values()}
    return recover_objcgs(image, memcgs, False, found - objcgs.keys(), coverage)
