# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of nodes and zones
---------------------------

Mirrors ``node_page_state()`` and ``mod_node_page_state()`` of :linux:`mm/vmstat.c`. A counter is
``pglist_data.vm_stat``, and the changes in ``struct per_cpu_nodestat`` that CPUs have not added
to it yet. ``node_page_state_add()`` adds to ``vm_stat`` and to ``vm_node_stat``, the sum over all
nodes that ``/proc/vmstat`` shows.

Counters of zones (``zone_page_state()``) are kept in the same way: ``zone.vm_stat``, the changes in
``struct per_cpu_zonestat``, and ``vm_zone_stat``.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, Type, offsetof
from drgn.helpers.linux.mmzone import NODE_DATA

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.layout import array_length, has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.memcontrol_vmstats import node_stat_items, stat_items
from memcg_inspect.linux.mm.mmzone import online_nodes, possible_nodes, zone_types
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Coverage, NodeStat
from memcg_inspect.model_counters import CounterWord

__all__ = (
    "node_stat_words",
    "read_node_stats",
    "read_total_stats",
    "read_zone_totals",
    "zone_stat_items",
    "zone_stat_words",
    "zone_stats",
)


def read_node_stats(image: Image, coverage: Coverage) -> dict[tuple[int, str], NodeStat]:
    """
    Read all counters of all nodes.

    Nodes that went offline keep their counters. They have no changes of CPUs.

    :param coverage: counts the nodes that were read, and those that are unreadable
    :return: by node and enumerator of ``enum node_stat_item``, in pages, or in KiB if the name ends
        in ``_KB``. (Nodes count items whose names end in ``_B`` in pages, too:
        ``mod_node_page_state()`` converts them.)
    """
    online, stats = online_nodes(image), {}
    for nid in possible_nodes(image):
        try:
            pgdat = NODE_DATA(image.prog, nid).read_()
            if not pgdat:
                continue
            folded = _array(image, pgdat.vm_stat)
            cpus = _node_changes(image, pgdat) if nid in online else {}
            coverage.read += 1
        except FaultError as error:
            coverage.miss("counters of a node", error.address, str(error))
            continue
        for slot, name in node_stat_items(image).items():
            stats[nid, name] = NodeStat(folded[slot], cpus.get(slot, 0))
    return stats


def read_total_stats(image: Image, coverage: Coverage) -> dict[str, int]:
    """
    Read the sums of the counters of all nodes, ``vm_node_stat[]``.

    :param coverage: counts what was read
    :return: by enumerator of ``enum node_stat_item``, in the units of :func:`read_node_stats()`;
        empty if they could not be read
    """
    try:
        totals = _array(image, image.object("vm_node_stat"))
        coverage.read += 1
    except UnknownKernelError:
        return {}
    except FaultError as error:
        coverage.miss("counters of all nodes", error.address, str(error))
        return {}
    return {name: totals[slot] for slot, name in node_stat_items(image).items()}


@per_image
def zone_stat_items(image: Image) -> dict[int, str]:
    """Return the enumerators of ``enum zone_stat_item`` by value, in order."""
    return stat_items(image, "enum zone_stat_item", "NR_VM_ZONE_STAT_ITEMS")


def zone_stats(image: Image, zone: Object) -> dict[str, NodeStat]:
    """
    Read all counters of a zone.

    :param zone: ``struct zone``
    :return: by enumerator of ``enum zone_stat_item``, in pages
    :raises drgn.FaultError: if they cannot be read
    """
    folded = _array(image, zone.vm_stat)
    cpus: dict[int, int] = {}
    if has_member(image, "struct zone", "per_cpu_zonestats"):
        stat = image.type("struct per_cpu_zonestat")
        if stat.has_member("vm_stat_diff"):  # CONFIG_SMP
            cpus = _changes(image, zone.per_cpu_zonestats, stat, "vm_stat_diff")
    return {
        name: NodeStat(folded[slot], cpus.get(slot, 0))
        for slot, name in zone_stat_items(image).items()
    }


def read_zone_totals(image: Image, coverage: Coverage) -> tuple[dict[str, int], dict[str, int]]:
    """
    Read ``vm_zone_stat[]``, and the sums of ``vm_stat`` over all zones, with pages or not.

    :param coverage: counts what was read
    :return: totals and sums by enumerator of ``enum zone_stat_item``, in pages; empty if they could
        not be read
    """
    sums = dict.fromkeys(zone_stat_items(image).values(), 0)
    try:
        totals = _array(image, image.object("vm_zone_stat"))
        for nid in possible_nodes(image):
            pgdat = NODE_DATA(image.prog, nid).read_()
            if not pgdat:
                continue
            zones = pgdat.node_zones
            for number in range(array_length(zones.type_)):
                values = _array(image, zones[number].vm_stat)
                for slot, name in zone_stat_items(image).items():
                    sums[name] += values[slot]
        coverage.read += 1
    except UnknownKernelError:
        return {}, {}
    except FaultError as error:
        coverage.miss("counters of all zones", error.address, str(error))
        return {}, {}
    return {name: totals[slot] for slot, name in zone_stat_items(image).items()}, sums


def zone_stat_words(image: Image, nid: int) -> Iterator[CounterWord]:
    """
    Yield the words that the counters of the zones of a node are in.

    The names of the counters are those of rows: with the enumerator of ``enum zone_type``.

    :raises drgn.FaultError: if the node cannot be read
    """
    zones, word = NODE_DATA(image.prog, nid).node_zones, image.memory.word_size
    for number, zone in zone_types(image).items():
        address = zones[number].vm_stat.address_of_().value_()
        for slot, name in zone_stat_items(image).items():
            yield CounterWord("zone_stat", f"{name}[{zone}]", address + slot * word, word)


def node_stat_words(image: Image, nid: int) -> Iterator[CounterWord]:
    """
    Yield the words that the counters of a node are in.

    :raises drgn.FaultError: if the node cannot be read
    """
    address = NODE_DATA(image.prog, nid).vm_stat.address_of_().value_()
    word = image.memory.word_size
    for slot, name in node_stat_items(image).items():
        yield CounterWord("vm_stat", name, address + slot * word, word)


def _array(image: Image, array: Object) -> list[int]:
    """Return the values of an array of ``atomic_long_t``."""
    memory = image.memory
    length = array_length(array.type_)
    data = memory.read(array.address_of_().value_(), length * memory.word_size)
    return [memory.signed_at(data, slot * memory.word_size) for slot in range(length)]


def _node_changes(image: Image, pgdat: Object) -> dict[int, int]:
    """Return the sum over CPUs of the changes that are not in ``vm_stat`` yet, by item."""
    # CONFIG_SMP=n has no per-CPU changes.
    if not has_member(image, "struct pglist_data", "per_cpu_nodestats"):
        return {}
    stat = image.type("struct per_cpu_nodestat")
    return _changes(image, pgdat.per_cpu_nodestats, stat, "vm_node_stat_diff")


def _changes(image: Image, percpu: Object, stat: Type, member: str) -> dict[int, int]:
    """
    Return the sum over CPUs of an array of ``s8``, by item.

    :param percpu: percpu pointer to a structure
    :param stat: the structure
    :param member: the array
    """
    start = percpu.value_() + offsetof(stat, member)
    length = array_length(member_type(stat, member))
    changes = [0] * length
    for offset in percpu_offsets(image).values():
        data = image.memory.read(start + offset, length)
        for slot, byte in enumerate(data):
            if byte:
                changes[slot] += byte - 256 if byte > 127 else byte
    return {slot: total for slot, total in enumerate(changes) if total}
