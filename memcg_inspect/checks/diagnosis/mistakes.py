# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Causes: a mistake of the kernel that shows in the counters of many memcgs
-------------------------------------------------------------------------

The pointer of a percpu allocation names one obj_cgroup, and its bytes are split over several nodes.
So no single charge proves that the kernel chose the wrong node for them, or the wrong size. The
counters of many memcgs show it:

* Each node differs, and the sum of all nodes does not, to the byte: the kernel chooses the wrong
  node.
* All differ in the same direction, and are of the memcgs that have one kind of memory: the kernel
  charges another size than such memory has.

In one memcg, counters of several nodes may be wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from memcg_inspect.checks.diagnosis.proofs import PROVED
from memcg_inspect.checks.identities import (
    hierarchy,
    kmem,
    objcg_bytes,
    percpu,
    references,
    usage,
)
from memcg_inspect.checks.rows import finding_key
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import counted
from memcg_inspect.report import Diagnosis, Effect, Finding

__all__ = ("CAUSES", "mistakes")

#: Name and meaning, for the list in ``docs/output.md`` (Markdown).
CAUSES = {"charged-size": "the kernel charges another size than memory of one kind has"}

#: The fewest memcgs. One may have a fault of its own.
_FEWEST = 3
#: Kinds of memory whose bytes the kernel splits over nodes, and functions that do.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "percpu": ("pcpu_memcg_pre_alloc_hook", "pcpu_memcg_post_alloc_hook", "pcpu_memcg_free_hook"),
    "zswap": ("obj_cgroup_charge_zswap", "obj_cgroup_uncharge_zswap"),
}
#: Bytes that are charged and were not found, by node; ``None`` on a kernel that counts for none.
_Nodes = Mapping[int | None, int]
#: Findings by their index.
_Findings = Mapping[int, Finding]


class _Off(NamedTuple):
    """
    Memcgs that are charged for other bytes than were found.

    :ivar nodes: bytes, by ``struct mem_cgroup *``
    :ivar objcgs: number of obj_cgroups whose bytes beside whole pages differ, by memcg and node
    :ivar charges: number of charges by memcg, of each of the kinds in :data:`_KINDS`
    """

    nodes: Mapping[int, _Nodes]
    objcgs: Mapping[int, Counter[int | None]]
    charges: Mapping[str, Counter[int]]

    @property
    def is_of_bytes(self) -> bool:
        """Whether most of them have obj_cgroups that differ. A wrong counter alone has none."""
        return 2 * sum(memcg in self.objcgs for memcg in self.nodes) >= len(self.nodes)

    @property
    def about(self) -> str:
        """``about``, if the bytes are known modulo a page of each of several obj_cgroups only."""
        several = any(n > 1 for nodes in self.objcgs.values() for n in nodes.values())
        return "about " if several else ""

    def kinds(self) -> list[str]:
        """Return the kinds of memory that all of them have."""
        return [kind for kind, found in self.charges.items() if self.nodes.keys() <= found.keys()]


def mistakes(snapshot: Snapshot, findings: _Findings) -> list[Diagnosis]:
    """
    Return the diagnosis of a mistake, or none.

    :param findings: those that have no diagnosis yet, by their index in the report
    """
    off = _bytes(snapshot, findings)
    moved = off._replace(nodes=_moved(snapshot, off))
    if moved.nodes:
        return [_elsewhere(snapshot, findings, moved)]
    kind = _kind_of_all(off)
    return [] if kind is None else [_other_size(snapshot, findings, off, kind)]


def _bytes(snapshot: Snapshot, findings: _Findings) -> _Off:
    """Return how many bytes more than were found are charged."""
    size = {kmem.CHECK.name: snapshot.image.page_size, objcg_bytes.CHECK.name: 1}
    off: defaultdict[int, Counter[int | None]] = defaultdict(Counter)
    objcgs: defaultdict[int, Counter[int | None]] = defaultdict(Counter)
    for f in findings.values():
        if f.memcg is not None and f.identity in size:
            off[f.memcg][f.nid] += size[f.identity] * f.off
            if f.objcg is not None and f.off:
                objcgs[f.memcg][f.nid] += 1
    nodes = {memcg: by for memcg, by in off.items() if any(by.values())}
    return _Off(nodes, dict(objcgs), _charges(snapshot) if nodes else {})


def _charges(snapshot: Snapshot) -> dict[str, Counter[int]]:
    charges: dict[str, Counter[int]] = {kind: Counter() for kind in _KINDS}
    for entry, amount in snapshot.ledger:
        memcg = snapshot.payer(entry.payer)
        if entry.kind in charges and memcg is not None:
            charges[entry.kind][memcg] += amount.charges
    return charges


def _moved(snapshot: Snapshot, off: _Off) -> dict[int, _Nodes]:
    """Return the memcgs whose nodes add up to 0; none if they are too few."""
    sums = {
        memcg: sum(nodes.values())
        for memcg, nodes in off.nodes.items()
        if min(nodes.values()) < 0 < max(nodes.values())
    }
    if sum(not total for total in sums.values()) < _FEWEST:
        return {}
    # What an obj_cgroup has beside whole pages is known modulo a page. A memcg has those of the
    # descendants that were removed, too.
    page = snapshot.image.page_size
    most = {memcg: page * off.objcgs[memcg].total() for memcg in sums if memcg in off.objcgs}
    return {
        memcg: off.nodes[memcg]
        for memcg, total in sums.items()
        if not total % page and abs(total) <= most.get(memcg, 0)
    }


def _kind_of_all(off: _Off) -> str | None:
    """Return the kind of memory that is charged with another size, if that explains all."""
    signs = {size > 0 for nodes in off.nodes.values() for size in nodes.values() if size}
    if len(off.nodes) < _FEWEST or len(signs) != 1 or not off.is_of_bytes:
        return None
    fitting = [kind for kind in off.kinds() if 2 * len(off.nodes) >= len(off.charges[kind])]
    return min(fitting, key=lambda kind: len(off.charges[kind]), default=None)


def _elsewhere(snapshot: Snapshot, findings: _Findings, off: _Off) -> Diagnosis:
    """Return the diagnosis of memory that is charged to other nodes than its own."""
    amounts = {m: sum(size for size in by.values() if size > 0) for m, by in off.nodes.items()}
    kinds, skew = off.kinds(), PROVED["skew"]

    def differs(f: Finding) -> bool:
        return f.nid is not None and _is_split(f, off, kinds)

    return _diagnosis(
        skew.cause,
        f"{off.about}{counted(sum(amounts.values()), 'bytes')} of kernel memory of "
        f"{counted(len(off.nodes), 'memcgs')}{_have(kinds)} are charged to other nodes than "
        "theirs: the kernel chooses the wrong node for such charges",
        amounts,
        _numbers(snapshot, findings, off, differs),
        findings,
        tuple(name for kind in kinds for name in _KINDS[kind]) or skew.functions,
    )


def _other_size(snapshot: Snapshot, findings: _Findings, off: _Off, kind: str) -> Diagnosis:
    """Return the diagnosis of memory that is charged with another size than its own."""
    sums = {memcg: sum(nodes.values()) for memcg, nodes in off.nodes.items()}
    page = snapshot.image.page_size

    def differs(f: Finding) -> bool:
        memcg = f.memcg or 0
        total, nodes = sums[memcg], off.nodes[memcg]
        if f.identity == usage.CHECK.name:
            # Each node has less than a page that is charged and not used.
            return f.off * total > 0 and abs(page * f.off - total) < page * (len(nodes) + 1)
        if f.identity == percpu.CHECK.name:
            most = page * off.objcgs[memcg].total() if memcg in off.objcgs else 0
            return kind == "percpu" and f.off * total > 0 and abs(f.off - total) <= most
        return f.nid in nodes and _is_split(f, off, [kind])

    total = sum(sums.values())
    return _diagnosis(
        "charged-size",
        f"{off.about}{counted(abs(total), 'bytes')} too {'much' if total > 0 else 'little'} are "
        f"charged for kernel memory of {counted(len(sums), 'memcgs')}{_have([kind])}: the kernel "
        "charges, or uncharges, another size than such memory has",
        {memcg: abs(size) for memcg, size in sums.items()},
        _numbers(snapshot, findings, off, differs),
        findings,
        _KINDS[kind],
    )


def _is_split(f: Finding, off: _Off, kinds: Sequence[str]) -> bool:
    """Return whether a finding on a memcg is one of charges that are split over nodes."""
    if f.identity == references.CHECK.name:
        # Which obj_cgroups a charge refers to depends on the nodes that are charged.
        return abs(f.off) <= sum(off.charges[kind][f.memcg or 0] for kind in kinds)
    return f.identity in (kmem.CHECK.name, objcg_bytes.CHECK.name)


def _have(kinds: Sequence[str]) -> str:
    return f" that have {' and '.join(kinds)} memory" if kinds else ""


def _numbers(
    snapshot: Snapshot,
    findings: _Findings,
    off: _Off,
    differs: Callable[[Finding], bool],
) -> Iterator[int]:
    """
    Yield the indices of the findings that are explained.

    :param differs: tells which findings of the memcgs are
    """
    below: Counter[tuple[int, int | None, str]] = Counter()
    for number, f in findings.items():
        if f.memcg in off.nodes and differs(f):
            yield number
            if f.objcg is None:
                for ancestor in snapshot.ancestors(f.memcg):
                    below[ancestor, f.nid, f.item] += f.off
    for number, f in findings.items():
        is_sum = f.identity == hierarchy.CHECK.name and f.memcg is not None
        if is_sum and f.off == below[f.memcg or 0, f.nid, f.item] != 0:
            yield number


def _diagnosis(
    cause: str,
    what: str,
    amounts: Mapping[int, int],
    numbers: Iterator[int],
    findings: _Findings,
    functions: tuple[str, ...],
) -> Diagnosis:
    """
    Return the diagnosis of a mistake.

    :param amounts: bytes that are wrong, by ``struct mem_cgroup *``
    :param numbers: indices of the findings that it explains
    """
    explained = tuple(sorted(numbers))
    return Diagnosis(
        cause=cause,
        what=what,
        confidence="likely",
        memcgs=tuple(sorted(amounts, key=lambda memcg: (-amounts[memcg], memcg))),
        nid=None,
        amount=sum(amounts.values()),
        unit="bytes",
        findings=explained,
        signature=tuple(
            Effect(**finding_key(f)._asdict(), amount=f.off, difference=f.off)
            for f in (findings[number] for number in explained)
        ),
        functions=functions,
    )
