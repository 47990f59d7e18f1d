# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Faults planted into the memory of an image, without a copy of the image.

:class:`Overlay` makes drgn read other values at some addresses. It works for every format of
dumps, and with DWARF and BTF. :class:`Subject` is an image in which planters choose what to change.

How to add a planter for an identity
------------------------------------

Each identity of ``memcg_inspect.checks.registry`` has a module of its name in
``tests/support/planters/`` with a tuple ``PLANTERS``. A test fails if an identity has none. A
planter is a function and the sizes to plant, the first of which is the default of quick tests:

    def total(subject: Subject, size: int) -> Fault:
        path, nid = subject.largest("kmem", "stack")
        counter = subject.percpu_counter(path, "NR_KERNEL_STACK_KB", nid)
        return Fault(
            (subject.add(counter, size),),
            (path,),
            {(path, nid, "NR_KERNEL_STACK_KB", size)},
        )

    PLANTERS = (Planter("the counter of a CPU", total, (-16, 4, 60_000)),)

- The function changes memory with :meth:`Subject.add` and :meth:`Subject.put`. It writes nothing
  itself: the fault has the writes.
- ``paths`` are the memcgs that the fault touches. Findings on these and on their ancestors are
  allowed, of any identity; a finding on another memcg makes the test fail.
- ``named`` are the findings that *this* identity must report, and no others: (path of the memcg or
  ``"?"``, node, item, difference). The difference is what the fault adds to the row. On an image
  that was stopped under load the row may have a difference of its own.
- A function that finds nothing to change raises :class:`NoVictim` and says what is missing.
- Use ``subject.snapshot`` and readers of ``memcg_inspect.linux`` to choose victims by what the
  planter needs, never by where things happen to be. :meth:`Subject.largest` takes a memcg at rest,
  or one under load, as the test asks for.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import drgn
from drgn import FaultError, Object, TypeKind
from drgn.helpers.linux.mm import follow_phys, phys_to_virt
from drgn.helpers.linux.percpu import per_cpu_ptr
from labkit.poke import byte_order

from memcg_inspect.checks.ledger import ChargeKind
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.collect import audit, collect
from memcg_inspect.image.image import Image
from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.report import Finding, Report
from support.findings import by_path, lost_updates, named
from support.guests import is_shared

_WORD = 8

#: (path of a memcg, node, item, difference) of a finding
Named = tuple[str, "int | None", str, "int | None"]

#: Identities for which a word that an earlier call left on the stack of a task casts doubt on a
#: memcg. Which tasks sleep with such a word differs from image to image.
BY_STACKS = {"active_memcg", "css_refs", "id_refs"}

#: How a planted fault ended.
Outcome = Literal["found", "unverifiable", "in-flight", "missed", "accused"]


class NoVictim(Exception):  # noqa: N818  it is no error: the image lacks what a planter changes
    """The image has nothing that a planter could change."""


class Write(NamedTuple):
    """Bytes to read at a virtual address."""

    address: int
    data: bytes


class Fault(NamedTuple):
    """What to write, which memcgs that touches, and what the identity must name."""

    writes: tuple[Write, ...]
    paths: tuple[str, ...]
    named: set[Named]


@dataclass(frozen=True)
class Planter:
    """
    A way to plant a fault.

    :ivar what: what it changes
    :ivar plant: returns the fault; raises :class:`NoVictim`
    :ivar sizes: what it adds, in the unit of the identity's rows. ``(0,)`` if the size is that
        of the object that it changes.
    """

    what: str
    plant: Callable[[Subject, int], Fault]
    sizes: tuple[int, ...] = (0,)


#: All that are in use.
_overlays: weakref.WeakSet[Overlay] = weakref.WeakSet()


def left_behind() -> list[drgn.Program]:
    """Return the programs that other tests use, and that read as if faults were in the image."""
    return [overlay.prog for overlay in _overlays if overlay.is_laid() and is_shared(overlay.prog)]


class Overlay:
    """
    The memory of a program, with other values at some addresses.

    Physical addresses and the kernel's direct mapping read the same: dumps with page tables only
    are read by physical address, others by virtual one.
    """

    def __init__(self, prog: drgn.Program) -> None:
        self.prog = prog
        # None where a page was left out of the dump
        self._words: dict[int, bytes | None] = {}
        self._original: dict[int, bytes | None] = {}
        _overlays.add(self)

    def write(self, writes: tuple[Write, ...]) -> None:
        """Make all readers of the program see these bytes."""
        for address, data in writes:
            for at in range(address - address % _WORD, address + len(data), _WORD):
                self._cover(at)
                word = bytearray(self._words[at] or bytes(_WORD))
                start, end = max(address, at), min(address + len(data), at + _WORD)
                word[start - at : end - at] = data[start - address : end - address]
                self._words[at] = bytes(word)

    def clear(self) -> None:
        """Make the image read as it was."""
        self._words.update(self._original)

    def is_laid(self) -> bool:
        """Return whether the image reads other than it was."""
        return self._words != self._original

    def _cover(self, at: int) -> None:
        if at in self._words:
            return
        prog = self.prog
        try:
            original = prog.read(at, _WORD)
        except FaultError:
            original = None
        self._words[at] = self._original[at] = original

        def read(address: int, count: int, offset: int, physical: bool) -> bytes:
            word = self._words[at]
            if word is None:
                raise FaultError("left out of the dump", address)
            return word[offset : offset + count]

        physical = int(follow_phys(prog["init_mm"].address_of_(), at))
        mapped = phys_to_virt(prog, physical).value_()
        for virtual in {at, mapped}:
            prog.add_memory_segment(virtual, _WORD, read, False)
        prog.add_memory_segment(physical, _WORD, read, True)


class Subject:
    """
    An image, read once, to choose victims from and to plant faults into.

    :ivar report: the audit of the image as it is
    :ivar snapshot: what was collected of it
    :ivar paths: ``struct mem_cgroup *`` of memcgs that were not removed, by path
    :ivar below: beginning of the paths of victims; empty for any
    :ivar avoid: beginning of the paths of other memcgs; empty for none
    :ivar doubtful: paths of other memcgs that planters must not choose
    """

    def __init__(self, prog: drgn.Program) -> None:
        self.prog = prog
        self.image = Image(prog)
        self.report: Report = audit(self.image)
        self.snapshot: Snapshot = collect(self.image)
        self.paths = by_path(self.report)
        self.below = self.avoid = ""
        self.doubtful: frozenset[str] = frozenset()
        self._overlay = Overlay(prog)

    def audit(self, fault: Fault) -> Report:
        """Audit the image with a fault. Nothing that was read before is used again."""
        try:
            self._overlay.write(fault.writes)
            return audit(Image(self.prog))
        finally:
            self._overlay.clear()

    # What planters choose

    def path(self, address: int) -> str:
        """Return the path of the memcg that pays for a charge to an obj_cgroup or memcg."""
        return self.snapshot.memcgs[self.snapshot.payer(address) or 0].path

    def memcg(self, path: str) -> Object:
        """Return the ``struct mem_cgroup *`` of a path."""
        return Object(self.prog, "struct mem_cgroup *", self.paths[path])

    def object(self, kind: str, address: int) -> Object:
        """Return ``Object(prog, kind, address)``."""
        return Object(self.prog, kind, address)

    def objcg(self, path: str, nid: int | None = None) -> int:
        """
        Return an obj_cgroup that a memcg charges slab objects to today.

        :param nid: the node it is for, on kernels with one for each node; ``None`` for any
        """
        used = {entry.payer for entry, _ in self.snapshot.ledger if entry.kind == "slab"}
        for address, objcg in self.snapshot.objcgs.items():
            if objcg.memcg != self.paths[path] or not objcg.memcg_refs or address not in used:
                continue
            if nid is None or objcg.nid in (None, nid):
                return address
        raise NoVictim(f"{path} has no obj_cgroup with slab objects")

    def other(self, path: str, nid: int | None = None) -> str:
        """
        Return another memcg without children that :meth:`objcg` knows one of.

        It may be outside of :attr:`below`, and is none of those that are in :attr:`doubtful`.
        """
        parents = {memcg.parent for memcg in self.snapshot.memcgs.values()}
        for thief, address in self.paths.items():
            if thief == path or address in parents or thief in self.doubtful:
                continue
            with suppress(NoVictim):
                self.objcg(thief, nid)
                return thief
        raise NoVictim(f"no memcg but {path} has slab objects")

    def may_change(self, path: str) -> bool:
        """Return whether a memcg is where planters may choose victims."""
        if path in self.doubtful:
            return False
        return path.startswith(self.below) and not (self.avoid and path.startswith(self.avoid))

    def victims(self) -> list[str]:
        """Return the paths of memcgs without children that planters may change."""
        parents = {memcg.parent for memcg in self.snapshot.memcgs.values()}
        chosen = [p for p, a in self.paths.items() if a not in parents and self.may_change(p)]
        if not chosen:
            raise NoVictim(f"no memcg is below {self.below}")
        return chosen

    def is_folded(self, path: str) -> bool:
        """Return whether all changes of a memcg's counters are in its totals, and known to be."""
        left = self.snapshot.unfolded[self.paths[path]]
        is_waiting = left.changed or left.pending or left.unsteady or any(left.updated.values())
        return left.complete and not is_waiting

    def largest(self, kind: ChargeKind, detail: str | None = None) -> tuple[str, int]:
        """Return the victim that has most of some memory, and the node that it has it on."""
        victims = {self.paths[path]: path for path in self.victims()}
        found = self.snapshot.by_node(kind, detail)
        # Of several with as much, the path decides: addresses differ from image to image.
        most, path, nid = max(
            (
                (amount.bytes, victims[memcg], nid)
                for (memcg, nid), amount in found.items()
                if memcg in victims
            ),
            default=(0, "", 0),
        )
        if not most:
            raise NoVictim(f"no memcg has {kind} memory {detail or ''}")
        return path, nid

    def item(self, *items: str) -> str:
        """Return the first of these counters that the kernel has."""
        return next(i for i in items if i in self.snapshot.features.items)

    def percpu_counter(self, path: str, item: str, nid: int | None = None, cpu: int = 0) -> Object:
        """Return a CPU's part of a counter of a memcg, or of its node."""
        memcg = self.memcg(path)
        stats = memcg.vmstats_percpu if nid is None else memcg.nodeinfo[nid].lruvec_stats_percpu
        return per_cpu_ptr(stats, cpu).state[StatReader(self.image, [item]).slots[item]]

    # What faults write

    def add(self, thing: Object, amount: int) -> Write:
        """Add to an integer, an atomic, or the like."""
        thing = _integer(thing)
        return self.put(thing, thing.value_() + amount)

    def put(self, thing: Object | int, value: int) -> Write:
        """Set an integer or a pointer; at a number, set the word at this address."""
        if isinstance(thing, int):
            return Write(thing, self._bytes(value, _WORD))
        return change(thing, value)

    def _bytes(self, value: int, size: int) -> bytes:
        # Modulo the width, as the kernel's own additions: a counter of a CPU may be below 0.
        return (value % (1 << 8 * size)).to_bytes(size, byte_order(self.prog))


def change(thing: Object, value: int) -> Write:
    """Return the change of an integer, a pointer, an atomic or a bit field to a value."""
    thing = _integer(thing)
    assert thing.address_ is not None
    start, bits = thing.bit_offset_ or 0, thing.bit_field_size_ or 8 * drgn.sizeof(thing)
    size, order = (start + bits + 7) // 8, byte_order(thing.prog_)
    shift, mask = start if order == "little" else 8 * size - start - bits, (1 << bits) - 1
    # What shares the bytes of a bit field stays. A page that is left out of a dump can be written.
    is_whole = bits == 8 * size
    old = 0 if is_whole else int.from_bytes(thing.prog_.read(thing.address_, size), order)
    # Modulo the width, as the kernel's own additions: a counter of a CPU may be below 0.
    new = old & ~(mask << shift) | (value & mask) << shift
    return Write(thing.address_, new.to_bytes(size, order))


def _integer(thing: Object) -> Object:
    """Return the only member, for ``atomic_t``, ``refcount_t`` and other structures with one."""
    kind = thing.type_
    while kind.kind == TypeKind.TYPEDEF:
        kind = kind.type
    if kind.kind == TypeKind.STRUCT and len(kind.members) == 1:
        return _integer(thing.member_(kind.members[0].name))
    return thing


# How it ended


class Ended(NamedTuple):
    """
    How a planted fault ended.

    :ivar outcome: ``found`` if the identity named exactly the fault. ``unverifiable`` if it did
        not, but says why it cannot. ``in-flight`` if it says that a charge of this very amount was
        half done there. ``missed`` if it did none of these. ``accused`` if something that
        the fault does not touch has a finding.
    :ivar why: the findings and rows behind it
    """

    outcome: Outcome
    why: str = ""


def _names(report: Report) -> dict[int | None, str]:
    return {None: "?"} | {memcg.address: memcg.path for memcg in report.memcgs}


def ended(clean: Report, identity: str, fault: Fault, now: Report) -> Ended:
    """
    Return how a planted fault ended.

    :param clean: report of the image without the fault
    :param now: report of the image with it
    """
    found = named(now, identity)
    own = _own_differences(clean, identity)
    wanted = {
        name: {name} | {(*name[:3], (name[3] or 0) + other) for other in own.get(name[:3], ())}
        for name in fault.named
    }
    known = {(f.identity, *name) for f, name in _findings(clean)}
    lost = lost_updates(clean)
    others = [
        (f.identity, *name)
        for f, name in _findings(now)
        if (f.identity, *name) not in known and not _may_touch(name[0], fault.paths)
        if f.identity != "updated" or name[0] not in lost
    ]
    if others:
        return Ended("accused", f"findings elsewhere: {others}")
    if all(found & options for options in wanted.values()):
        more = found - set().union(*wanted.values()) - named(clean, identity)
        return Ended("accused", f"{identity} also names {more}") if more else Ended("found")
    why = f"{now.verdict}: {identity} names {sorted(found, key=str)}, not {fault.named}"
    states = _states(now, identity)
    ends = [
        {"differs"} if found & options else states[name[:3]] for name, options in wanted.items()
    ]
    # A fault of two rows is found in one of them, if a charge that is half done hides the other.
    told = any("unverifiable" in end for end in ends)
    if told and now.verdict != "exact" and all(end - {"exact"} for end in ends):
        return Ended("unverifiable", why)
    if all(end & {"differs", "in-flight"} for end in ends) and any("in-flight" in e for e in ends):
        return Ended("in-flight", why)
    return Ended("missed", why)


def cancels(clean: Report, identity: str, fault: Fault) -> bool:
    """Return whether a row with a difference of its own is exact with the fault."""
    own = _own_differences(clean, identity)
    return any(-(name[3] or 0) in own.get(name[:3], ()) for name in fault.named)


def _findings(report: Report) -> list[tuple[Finding, Named]]:
    names = _names(report)
    return [(f, (names.get(f.memcg, "?"), f.nid, f.item, f.difference)) for f in report.findings]


def _may_touch(path: str, paths: tuple[str, ...]) -> bool:
    """Whether a path, or ``?`` for none, is one of these or above one of them."""
    return path in ("?", "/") or any(p == path or p.startswith(path + "/") for p in paths)


def _own_differences(report: Report, identity: str) -> dict[tuple[str, int | None, str], set[int]]:
    """Return the differences that rows have without a fault: those in flight."""
    names, found = _names(report), defaultdict(set)
    for row in report.rows:
        if row.identity == identity and row.difference:
            found[names.get(row.memcg, "?"), row.nid, row.item].add(row.difference)
    return found


def _states(report: Report, identity: str) -> dict[tuple[str, int | None, str], set[str]]:
    """Return the states of the rows of an identity; those of obj_cgroups share a key."""
    names, found = _names(report), defaultdict(set)
    for row in report.rows:
        if row.identity == identity:
            found[names.get(row.memcg, "?"), row.nid, row.item].add(row.status)
    return found
