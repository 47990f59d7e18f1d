# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of nodes
-----------------

Mirrors ``node_page_state()`` and ``mod_node_page_state()`` of :linux:`mm/vmstat.c`. A counter is
``pglist_data.vm_stat``, and the changes in ``struct per_cpu_nodestat`` that CPUs have not added
to it yet. ``node_page_state_add()`` adds to ``vm_stat`` and to ``vm_node_stat``, the sum over all
nodes that ``/proc/vmstat`` shows.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import FaultError, Object, offsetof
from drgn.helpers.linux.mmzone import NODE_DATA

from memcg_inspect.image.image import Image
from memcg_inspect.image.layout import array_length, has_member, member_type
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.mm.memcontrol_vmstats import node_stat_items
from memcg_inspect.linux.mm.mmzone import online_nodes, possible_nodes
from memcg_inspect.linux.mm.percpu_defs import percpu_offsets
from memcg_inspect.model import Coverage, NodeStat
from memcg_inspect.model_counters import CounterWord

__all__ = ("node_stat_words", "read_node_stats", "read_total_stats")


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
            cpus = _changes(image, pgdat) if nid in online else {}
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


def _changes(image: Image, pgdat: Object) -> dict[int, int]:
    """Return the sum over CPUs of the changes that are not in ``vm_stat`` yet, by item."""
    # CONFIG_SMP=n has no per-CPU changes.
    if not has_member(image, "struct pglist_data", "per_cpu_nodestats"):
        return {}
    nodestat = image.type("struct per_cpu_nodestat")
    start = pgdat.per_cpu_nodestats.value_() + offsetof(nodestat, "vm_node_stat_diff")
    length = array_length(member_type(nodestat, "vm_node_stat_diff"))  # of s8
    changes = [0] * length
    for offset in percpu_offsets(image).values():
        data = image.memory.read(start + offset, length)
        for slot, byte in enumerate(data):
            if byte:
                changes[slot] += byte - 256 if byte > 127 else byte
    return {slot: total for slot, total in enumerate(changes) if total}
