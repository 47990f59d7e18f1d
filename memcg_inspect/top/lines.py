# SPDX-License-Identifier: LGPL-2.1-or-later
"""The lines that top shows: memcgs, or what one memcg is charged for, by node and with rates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from memcg_inspect.collect.counter_sample import Sample
from memcg_inspect.model_snapshot import SITES, ChargeSnapshot, MemcgKey

__all__ = (
    "DETAILS",
    "Detail",
    "Line",
    "Walk",
    "detail_lines",
    "is_there",
    "memcg_lines",
    "sorted_lines",
    "why_missing",
)

Detail = Literal["kinds", "caches", "call sites"]
DETAILS: tuple[Detail, ...] = ("kinds", "caches", "call sites")

#: A removed memcg, and one that the last audit found fault with.
DYING, FAULT = "D", "!"


class Walk(NamedTuple):
    """
    The charges of all memcgs at one time.

    :ivar seconds: when, by a clock that is never set
    :ivar clock: when, in seconds since 1970
    """

    seconds: float
    clock: float
    snapshot: ChargeSnapshot


class Line(NamedTuple):
    """
    One line.

    :ivar key: what it is about; the same at all times
    :ivar label: path of a memcg, name of a cache or call site
    :ivar marks: :data:`DYING`, :data:`FAULT`
    :ivar total: bytes; ``None`` if they are not known
    :ivar rate: growth in bytes per second; ``None`` if it is not known
    :ivar nodes: bytes by node, likewise
    """

    key: tuple[str | int | None, ...]
    label: str
    marks: str
    total: int | None
    rate: float | None
    nodes: tuple[int | None, ...]


def memcg_lines(
    now: Sample, before: Sample | None, item: str, faults: Collection[MemcgKey] = ()
) -> list[Line]:
    """
    Return a line for each memcg, descendants included.

    :param before: what rates are since
    :param item: as in :meth:`~memcg_inspect.collect.counter_sample.Sample.amount`
    :param faults: the memcgs that an audit found fault with
    """
    seconds = 0.0 if before is None else now.seconds - before.seconds
    found = []
    for address, memcg in now.memcgs.items():
        total, key = now.amount(address, item), MemcgKey(memcg.path, memcg.cgroup_id)
        old = None if before is None else before.memcgs.get(address)
        was = None
        if before is not None and old is not None and key == (old.path, old.cgroup_id):
            was = before.amount(address, item)
        marks = (DYING if memcg.state == "dying" else "") + (FAULT if key in faults else "")
        nodes = tuple(now.amount(address, item, nid) for nid in now.nodes)
        rate = _rate(total, was, seconds)
        found.append(Line((*key, address), memcg.path, marks, total, rate, nodes))
    return found


def _rate(now: int | None, before: int | None, seconds: float) -> float | None:
    if now is None or before is None or seconds <= 0:
        return None
    return (now - before) / seconds


def is_there(walk: Walk, memcg: MemcgKey) -> bool:
    """Return whether a walk has found a memcg."""
    return any((some.path, some.cgroup_id) == memcg for some in walk.snapshot.memcgs)


def _within(found: ChargeSnapshot, memcg: MemcgKey) -> set[int]:
    """Return the numbers of a memcg and of its descendants in a snapshot."""
    below = "/" if memcg.path == "/" else f"{memcg.path}/"
    return {
        number
        for number, some in enumerate(found.memcgs)
        # A removed memcg may have the path of another one.
        if (some.path, some.cgroup_id) == memcg
        or (some.path.startswith(below) and some.path != memcg.path)
    }


def why_missing(walk: Walk, detail: Detail) -> Mapping[str, str]:
    """Return the kinds of charges that may not all be in a walk, and why."""
    wanted = {"caches": "slab", "call sites": SITES}.get(detail)
    missing = walk.snapshot.missing
    if wanted is not None:
        return {wanted: missing[wanted]} if wanted in missing else {}
    return {kind: why for kind, why in missing.items() if kind != SITES}


class _Amounts:
    """What one memcg is charged for, added up by label and node."""

    def __init__(self, walk: Walk, memcg: MemcgKey, detail: Detail) -> None:
        self._by_label: Counter[str] = Counter()
        self._by_node: defaultdict[str, Counter[int | None]] = defaultdict(Counter)
        self._missing, self._has_kinds = set(why_missing(walk, detail)), detail == "kinds"
        self._is_there = is_there(walk, memcg)
        within = _within(walk.snapshot, memcg)
        for who, node, label, size in _rows(walk.snapshot, detail):
            if who in within:
                self._by_label[label] += size
                self._by_node[label][node] += size

    def labels(self) -> dict[str, int]:
        """Return the labels, with their bytes."""
        return self._by_label

    def is_known(self, label: str) -> bool:
        """Return whether all that has a label was read."""
        # Caches and call sites are known or missing as a whole.
        is_missing = label.split(" ")[0] in self._missing if self._has_kinds else self._missing
        return self._is_there and not is_missing

    def total(self, label: str) -> int | None:
        """Return the bytes with a label; ``None`` if there may be more."""
        if not self.is_known(label):
            return None
        return self._by_label[label]

    def shown(self, label: str) -> int | None:
        """Return the bytes with a label that were found; ``None`` if none was, and some may be."""
        return self._by_label[label] or self.total(label)

    def on_node(self, label: str, nid: int) -> int | None:
        """Return the bytes on a node; ``None`` if there may be some."""
        amounts = self._by_node[label]
        if amounts[nid] or (self.is_known(label) and not amounts[None]):
            return amounts[nid]
        return None


def _rows(
    found: ChargeSnapshot, detail: Detail
) -> Iterator[tuple[int | None, int | None, str, int]]:
    """Return memcg, node, label and bytes of each amount in a snapshot."""
    if detail == "kinds":
        for charge in found.charges:
            what = "" if charge.what == charge.kind else charge.what
            yield charge.memcg, charge.node, f"{charge.kind} {what}".strip(), charge.bytes
    elif detail == "caches":
        for slab in found.slabs:
            yield slab.memcg, slab.node, slab.cache, slab.bytes
    else:
        for site in found.sites or ():
            yield site.memcg, site.node, site.site, site.bytes


def detail_lines(
    now: Walk, before: Walk | None, memcg: MemcgKey, detail: Detail, nodes: Sequence[int]
) -> list[Line]:
    """
    Return what a memcg and its descendants are charged for; nothing if it is not there any more.

    :param before: what rates are since
    """
    if not is_there(now, memcg):
        return []
    amounts = _Amounts(now, memcg, detail)
    old = None if before is None else _Amounts(before, memcg, detail)
    seconds = 0.0 if before is None else now.seconds - before.seconds
    labels: Iterable[str] = {**amounts.labels(), **(old.labels() if old else {})}
    return [
        Line(
            key=(label,),
            label=label,
            marks="",
            total=amounts.shown(label),
            rate=_rate(amounts.total(label), None if old is None else old.total(label), seconds),
            nodes=tuple(amounts.on_node(label, nid) for nid in nodes),
        )
        for label in labels
    ]


def sorted_lines(
    lines: Iterable[Line], by: str, nodes: Sequence[int], is_reversed: bool = False
) -> list[Line]:
    """
    Return lines in order, the largest first; by ``name``, in alphabetical order.

    What is not known is last in any case.

    :param by: ``name``, ``total``, ``rate``, or a node as ``node N``; a node that is not there
        counts as the total
    :param is_reversed: whether the smallest are the first
    """
    if by == "name":
        return sorted(lines, key=lambda line: (line.label, str(line.key)), reverse=is_reversed)
    sizes: Mapping[str, Callable[[Line], float | None]] = {
        "total": lambda line: line.total,
        "rate": lambda line: line.rate,
        **{f"node {nid}": _of_node(number) for number, nid in enumerate(nodes)},
    }
    size, sign = sizes.get(by, sizes["total"]), 1 if is_reversed else -1

    def order(line: Line) -> tuple[bool, float, float, str]:
        value = size(line)
        # Of lines that do not grow, the largest first.
        return value is None, sign * (value or 0), -(line.total or 0), line.label

    return sorted(lines, key=order)


def _of_node(number: int) -> Callable[[Line], float | None]:
    return lambda line: line.nodes[number]
