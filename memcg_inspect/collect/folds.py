# SPDX-License-Identifier: LGPL-2.1-or-later
"""Read what was folded of the counters of memcgs, and what was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress, count
from operator import or_
from typing import NamedTuple

from drgn import FaultError

from memcg_inspect.image.image import Image, per_image
from memcg_inspect.image.lookup import UnknownKernelError
from memcg_inspect.linux.kernel.rstat import read_updated
from memcg_inspect.linux.mm.memcontrol_vmstats import (
    Cell,
    StatArrays,
    StatReader,
    event_slots,
    slot_names,
)
from memcg_inspect.linux.mm.mmzone import memory_nodes, steady_nodes
from memcg_inspect.model import Coverage, ImageError
from memcg_inspect.model_counters import LocalStat, Unfolded

__all__ = ("Folded", "Folds")

#: Names of changed counters by CPU.
Changed = dict[int, set[str]]


class _EventNames(NamedTuple):
    """
    The event of each index of the arrays of events.

    :ivar names: names by index; without those that are not known, an event is told by its index
    :ivar missed: what could not be read, by the arguments of :meth:`Coverage.miss()`
    """

    names: Mapping[int, str]
    missed: tuple[str, int, str] | None = None


@per_image
def _event_names(image: Image) -> _EventNames:
    what = "names of events"
    try:
        return _EventNames({slot: name for name, slot in event_slots(image).items()})
    except FaultError as error:
        return _EventNames({}, (what, error.address, str(error)))
    except UnknownKernelError:
        return _EventNames({})  # no identity needs them
    except ImageError as error:
        return _EventNames({}, (what, 0, str(error)))


@dataclass
class Folded:
    """
    What arrays of counters say about flushes, by ``struct mem_cgroup *``. It can be pickled.

    :ivar local: local counters by (``struct mem_cgroup *``, node) and enumerator, those of the
        memcg itself with ``None`` for the node. Counters of which both are 0 are left out. Empty
        on kernels without ``state_local``
    :ivar changed: counters that CPUs have changed since the last flush
    :ivar pending: counters with ``state_pending``
    :ivar unsteady: by CPU, a node with changes that may have had no memory for a time
    :ivar partial: memcgs some of whose arrays could not be read
    """

    local: dict[Cell, dict[str, LocalStat]] = field(default_factory=dict)
    changed: dict[int, Changed] = field(default_factory=dict)
    pending: dict[int, set[str]] = field(default_factory=dict)
    unsteady: dict[int, dict[int | None, int]] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)

    def merge(self, other: Folded) -> None:
        """Add what the arrays of other memcgs say."""
        self.local |= other.local
        self.changed |= other.changed
        self.pending |= other.pending
        self.unsteady |= other.unsteady
        self.partial |= other.partial


class Folds:
    """
    Adds up what arrays of counters say about flushes.

    :ivar found: what they say
    """

    def __init__(self, image: Image) -> None:
        self.image = image
        self.found = Folded()
        #: On a running kernel, the memcgs' own arrays, to see whether they change.
        self._arrays: dict[int, StatArrays] = {}

    def add_memcg(self, memcg: int, arrays: StatArrays, events: StatArrays) -> None:
        """
        Add the counters of a memcg.

        :param memcg: ``struct mem_cgroup *``
        :param arrays: arrays of its counters
        :param events: arrays of its events
        """
        self._add(memcg, None, arrays, slot_names(self.image))
        self._add_changes(memcg, events, _event_names(self.image).names)
        if self.image.is_moving:
            self._arrays[memcg] = arrays

    def add_lruvec(self, memcg: int, nid: int, arrays: StatArrays) -> None:
        """Add the counters of a memcg on a node."""
        # mem_cgroup_css_rstat_flush() leaves out nodes without memory.
        nodes = memory_nodes(self.image)
        if nodes is not None and nid not in nodes:
            return
        if nid in steady_nodes(self.image):
            self._add(memcg, nid, arrays, slot_names(self.image))
            return
        self._add_local(memcg, nid, arrays, slot_names(self.image))
        found = self.found.unsteady.setdefault(memcg, {})
        found |= dict.fromkeys(arrays.changes, nid)
        if any(arrays.pending()):
            found[None] = nid

    def miss(self, memcg: int) -> None:
        """Add a memcg whose counters, or those of a node of it, could not be read."""
        self.found.partial.add(memcg)

    def _add(
        self, memcg: int, nid: int | None, arrays: StatArrays, names: Mapping[int, str]
    ) -> None:
        self._add_changes(memcg, arrays, names)
        self._add_local(memcg, nid, arrays, names)

    def _add_local(
        self, memcg: int, nid: int | None, arrays: StatArrays, names: Mapping[int, str]
    ) -> None:
        local = arrays.local()
        if local is not None and arrays.is_zero:
            self.found.local[memcg, nid] = {}
        elif local is not None:
            flushed = arrays.flushed()
            self.found.local[memcg, nid] = {
                names[slot]: LocalStat(local[slot], flushed[slot])
                for slot in compress(count(), map(or_, local, flushed))
                if slot in names
            }

    def _add_changes(self, memcg: int, arrays: StatArrays, names: Mapping[int, str]) -> None:
        changed = self.found.changed.setdefault(memcg, {})
        pending = self.found.pending.setdefault(memcg, set())
        if arrays.is_zero:
            return
        for cpu, slots in arrays.changes.items():
            changed.setdefault(cpu, set()).update(names.get(s, str(s)) for s in slots)
        values = arrays.pending()
        if any(values):
            pending |= {names.get(s, str(s)) for s, value in enumerate(values) if value}

    def unfolded(self, reader: StatReader, coverage: Coverage) -> dict[int, Unfolded]:
        """
        Return the changes that are not folded yet, by ``struct mem_cgroup *``.

        :param coverage: counts the CPUs whose lists of updated memcgs were read, and has the names
            of events if they could not be read
        """
        if missed := _event_names(self.image).missed:
            coverage.miss(*missed)
        all_changed, pending = self.found.changed, self.found.pending
        updated = read_updated(self.image, all_changed, coverage)
        found = {
            memcg: Unfolded(
                changed={cpu: tuple(sorted(names)) for cpu, names in sorted(changed.items())},
                pending=tuple(sorted(pending[memcg])),
                updated={cpu: memcg in listed for cpu, listed in updated.items()},
                complete=memcg not in self.found.partial,
                unsteady=self.found.unsteady.get(memcg, {}),
            )
            for memcg, changed in all_changed.items()
        }
        if self.image.is_moving:
            return {memcg: self._unmoved(memcg, left, reader) for memcg, left in found.items()}
        return found

    def _unmoved(self, memcg: int, left: Unfolded, reader: StatReader) -> Unfolded:
        """
        Leave out the changes that are on no list and have been flushed since they were read.

        On a running kernel, a flush between reading the counters and reading the lists takes a
        memcg off its lists. It also changes ``state_prev``, or ``state_pending``.
        """
        alone = [cpu for cpu in left.changed if not left.updated.get(cpu, True)]
        if not alone and (not left.pending or any(left.updated.values())):
            return left
        before = self._arrays[memcg]
        try:
            now = reader.memcg_arrays(self.image.pointer("struct mem_cgroup *", memcg))
        except FaultError:
            return left._replace(changed={}, pending=())  # it was freed
        pairs = [(now, before), (reader.event_arrays(now), reader.event_arrays(before))]
        moved = {cpu for cpu in alone if not all(a.is_same(cpu, b) for a, b in pairs)}
        is_stuck = all(a.pending() == b.pending() for a, b in pairs)
        return left._replace(
            changed={cpu: names for cpu, names in left.changed.items() if cpu not in moved},
            pending=left.pending if is_stuck else (),
        )
