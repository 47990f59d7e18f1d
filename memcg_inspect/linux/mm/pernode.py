# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Kernel memory accounted by node
-------------------------------

Mirrors what the series that accounts kernel memory by node does in :linux:`mm/percpu.c` and
:linux:`mm/zswap.c`. No released kernel has it. It splits a percpu allocation and a zswap entry
by node, and charges each part to the obj_cgroup of that node.

There are two rules for the split. The *physical* rule books each byte to the node of the page
that holds it; :meth:`.PercpuReader.data_nodes` and :meth:`.ZswapReader.nodes` return that. The
*posted* rule is the one of the series as posted in June 2026; the functions of this module
return that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from drgn import FaultError

from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol import accounting
from memcg_inspect.linux.mm.mmzone import mem_map, possible_nodes
from memcg_inspect.linux.mm.percpu import PcpuArea, PercpuReader
from memcg_inspect.model import Coverage, Objcg, ObjcgSet

__all__ = ("accounts_by_node", "posted_percpu_nodes", "posted_zswap_nodes", "read_objcg_sets")


def accounts_by_node(image: Image) -> bool:
    """Return whether this kernel accounts kernel memory by node."""
    return accounting(image) == "kmem-per-node"


def posted_percpu_nodes(reader: PercpuReader, area: PcpuArea) -> Counter[int]:
    """
    Return the bytes of a percpu allocation by node, split by the posted rule.

    The rule splits the size into pages, not the range. It ignores where in its first page an
    allocation begins. So an allocation that crosses into another page is booked to the node of
    the first one.
    """
    page_size = mem_map(reader.image).page_size
    nodes: Counter[int] = Counter()
    for page, at in enumerate(range(0, area.size, page_size), area.offset // page_size):
        part = min(page_size, area.size - at)
        for nid, cpus in reader.page_nodes(area.chunk, page).items():
            nodes[nid] += part * cpus
    return nodes


def posted_zswap_nodes(nodes: Mapping[int, int]) -> dict[int, int]:
    """
    Return the bytes of a zswap entry by node, split by the posted rule.

    The rule books the whole entry to the node of the page in which its data begins.

    :param nodes: bytes by the node of the page that holds them, in the order of the data
    """
    return {next(iter(nodes)): sum(nodes.values())} if nodes else {}


def read_objcg_sets(
    image: Image, objcgs: Iterable[Objcg], coverage: Coverage
) -> dict[int, ObjcgSet]:
    """
    Read the sets that obj_cgroups refer to.

    :param objcgs: the obj_cgroups
    :param coverage: counts the sets that were read, and those that are unreadable
    :return: by ``struct obj_cgroup_set *``
    """
    found: dict[int, ObjcgSet] = {}
    for address in dict.fromkeys(objcg.set for objcg in objcgs if objcg.set):
        members = image.pointer("struct obj_cgroup_set *", address)
        try:
            entries = {nid: members.objcgs[nid].value_() for nid in possible_nodes(image)}
            found[address] = ObjcgSet(address, int(members.refcnt.refs.counter), entries)
            coverage.read += 1
        except FaultError as error:
            coverage.miss("set of obj_cgroups", error.address, str(error))
    return found
