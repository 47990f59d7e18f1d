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


def mistakes(snapshot: Snapshot, findings: _Findings) -> list[Diagnosis]:
    """
    Return the diagnosis of a mistake, or none.

    :param findings: those that have no diagnosis yet, by their index in the report
    """
    off, objcgs = _bytes(snapshot, findings)
    moved = _moved(snapshot, off, objcgs)
    if moved:
        return [_elsewhere(snapshot, findings, moved)]
    kind = _kind_of_all(snapshot, off)
    return [] if kind is None else [_other_size(snapshot, findings, off, kind)]


def _bytes(snapshot: Snapshot, findings: _Findings) -> tuple[dict[int, _Nodes], Counter[int]]:
    """
    Return how many bytes more than were found are charged, by ``struct mem_cgroup *``.

    :return: also the number of obj_cgroups that differ
    """
    size = {kmem.CHECK.name: snapshot.image.page_size, objcg_bytes.CHECK.name: 1}
    off: defaultdict[int, Counter[int | None]] = defaultdict(Counter)
    objcgs: Counter[int] = Counter()
    for f in findings.values():
        if f.memcg is not None and f.identity in size:
            off[f.memcg][f.nid] += size[f.identity] * f.off
            objcgs[f.memcg] += f.objcg is not None
    return {memcg: nodes for memcg, nodes in off.items() if any(nodes.values())}, objcgs


def _moved(
    snapshot: Snapshot, off: Mapping[int, _Nodes], objcgs: Mapping[int, int]
) -> dict[int, _Nodes]:
    """Return the memcgs whose nodes add up to 0; none if they are too few."""
    sums = {memcg: sum(nodes.values()) for memcg, nodes in off.items()}
    if sum(not total for total in sums.values()) < _FEWEST:
        return {}
    # What an obj_cgroup has beside whole pages is known modulo a page. A memcg has those of the
    # descendants that were removed, too.
    page = snapshot.image.page_size
    return {
        memcg: off[memcg]
        for memcg, total in sums.items()
        if not total or (not total % page and abs(total) <= page * objcgs[memcg])
    }


def _kind_of_all(snapshot: Snapshot, off: Mapping[int, _Nodes]) -> str | None:
    """Return the kind of memory that is charged with another size, if that explains all."""
    signs = {size > 0 for nodes in off.values() for size in nodes.values() if size}
    if len(off) < _FEWEST or len(signs) != 1:
        return None
    payers = _payers(snapshot)
    fitting = [
        kind for kind in _KINDS if off.keys() <= payers[kind] and 2 * len(off) >= len(payers[kind])
    ]
    return min(fitting, key=lambda kind: len(payers[kind]), default=None)


def _payers(snapshot: Snapshot) -> dict[str, set[int]]:
    """Return the memcgs that are charged for each kind of memory."""
    payers: dict[str, set[int]] = {kind: set() for kind in _KINDS}
    for entry, _ in snapshot.ledger:
        memcg = snapshot.payer(entry.payer)
        if entry.kind in payers and memcg is not None:
            payers[entry.kind].add(memcg)
    return payers


def _elsewhere(snapshot: Snapshot, findings: _Findings, moved: Mapping[int, _Nodes]) -> Diagnosis:
    """Return the diagnosis of memory that is charged to other nodes than its own."""
    amounts = {m: sum(size for size in by.values() if size > 0) for m, by in moved.items()}
    payers = _payers(snapshot)
    common = [kind for kind in _KINDS if moved.keys() <= payers[kind]]
    return _diagnosis(
        PROVED["skew"].cause,
        f"{counted(sum(amounts.values()), 'bytes')} of kernel memory of "
        f"{counted(len(moved), 'memcgs')}{_have(common)} are charged to other nodes than theirs: "
        "the kernel chooses the wrong node for such charges",
        amounts,
        _numbers(snapshot, findings, moved, lambda f: f.nid is not None and f.identity in _SPLIT),
        findings,
        PROVED["skew"].functions,
    )


#: Identities whose rows differ if the kernel chooses other nodes. Which obj_cgroups a charge refers
#: to depends on the nodes that are charged.
_SPLIT = (kmem.CHECK.name, objcg_bytes.CHECK.name, references.CHECK.name)


def _other_size(
    snapshot: Snapshot, findings: _Findings, off: Mapping[int, _Nodes], kind: str
) -> Diagnosis:
    """Return the diagnosis of memory that is charged with another size than its own."""
    sums = {memcg: sum(nodes.values()) for memcg, nodes in off.items()}
    page = snapshot.image.page_size

    def differs(f: Finding) -> bool:
        if f.identity == usage.CHECK.name:
            # Each node has less than a page that is charged and not used.
            nodes = off[f.memcg or 0]
            return abs(page * f.off - sums[f.memcg or 0]) < page * (len(nodes) + 1)
        if f.identity == percpu.CHECK.name:
            return kind == "percpu" and f.off * sums[f.memcg or 0] > 0
        return f.identity in _SPLIT and f.nid in off[f.memcg or 0]

    total = sum(sums.values())
    return _diagnosis(
        "charged-size",
        f"{counted(abs(total), 'bytes')} too {'much' if total > 0 else 'little'} are charged for "
        f"kernel memory of {counted(len(off), 'memcgs')}{_have([kind])}: the kernel charges, or "
        "uncharges, another size than such memory has",
        {memcg: abs(size) for memcg, size in sums.items()},
        _numbers(snapshot, findings, off, differs),
        findings,
        _KINDS[kind],
    )


def _have(kinds: Sequence[str]) -> str:
    return f" that have {' and '.join(kinds)} memory" if kinds else ""


def _numbers(
    snapshot: Snapshot,
    findings: _Findings,
    memcgs: Mapping[int, _Nodes],
    differs: Callable[[Finding], bool],
) -> Iterator[int]:
    """
    Yield the indices of the findings that are explained.

    :param differs: tells which findings of the memcgs are
    """
    below: Counter[tuple[int, int | None, str]] = Counter()
    for number, f in findings.items():
        if f.memcg in memcgs and differs(f):
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
