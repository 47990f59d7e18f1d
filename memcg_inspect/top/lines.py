# SPDX-License-Identifier: LGPL-2.1-or-later
"""The lines that top shows: memcgs, or what one memcg is charged for, by node and with rates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from memcg_inspect.collect.counter_sample import Sample
from memcg_inspect.model_snapshot import ChargeSnapshot

__all__ = ("DETAILS", "Detail", "Line", "Walk", "detail_lines", "memcg_lines", "sorted_lines")

Detail = Literal["kinds", "caches", "call sites"]
DETAILS: tuple[Detail, ...] = ("kinds", "caches", "call sites")

#: A removed memcg, and one that the last audit found fault with.
DYING, FAULT = "D", "!"


class Walk(NamedTuple):
    """
    The charges of all memcgs at one time.

    :ivar seconds: when, by a clock that is never set
    """

    seconds: float
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
    now: Sample, before: Sample | None, item: str, faults: Collection[int] = ()
) -> list[Line]:
    """
    Return a line for each memcg, descendants included.

    :param before: what rates are since
    :param item: as in :meth:`~memcg_inspect.collect.counter_sample.Sample.amount`
    :param faults: ``struct mem_cgroup *`` of the memcgs that an audit found fault with
    """
    seconds = 0.0 if before is None else now.seconds - before.seconds
    found = []
    for address, memcg in now.memcgs.items():
        total = now.amount(address, item)
        # The address may be that of another memcg since.
        old = None if before is None else before.memcgs.get(address)
        was = None
        if before is not None and old is not None and old.cgroup_id == memcg.cgroup_id:
            was = before.amount(address, item)
        marks = (DYING if memcg.state == "dying" else "") + (FAULT if address in faults else "")
        nodes = tuple(now.amount(address, item, nid) for nid in now.nodes)
        key = (memcg.path, memcg.cgroup_id, address)
        found.append(Line(key, memcg.path, marks, total, _rate(total, was, seconds), nodes))
    return found


def _rate(now: int | None, before: int | None, seconds: float) -> float | None:
    if now is None or before is None or seconds <= 0:
        return None
    return (now - before) / seconds


class _Amounts:
    """What one memcg is charged for, added up by label and node."""

    def __init__(self, walk: Walk, memcg: str, detail: Detail) -> None:
        self.totals: Counter[str] = Counter()
        self.by_node: defaultdict[str, Counter[int | None]] = defaultdict(Counter)
        found = walk.snapshot
        within = {n for n, some in enumerate(found.memcgs) if is_within(some.path, memcg)}
        for who, node, label, size in _rows(found, detail):
            if who in within:
                self.totals[label] += size
                self.by_node[label][node] += size


def is_within(path: str, memcg: str) -> bool:
    """Return whether a path is that of a memcg, or of a descendant."""
    return memcg == "/" or path == memcg or path.startswith(f"{memcg}/")


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
    now: Walk, before: Walk | None, memcg: str, detail: Detail, nodes: Sequence[int]
) -> list[Line]:
    """
    Return what a memcg and its descendants are charged for.

    :param before: what rates are since
    :param memcg: its path
    """
    amounts = _Amounts(now, memcg, detail)
    old = None if before is None else _Amounts(before, memcg, detail)
    seconds = 0.0 if before is None else now.seconds - before.seconds
    labels: Iterable[str] = {**amounts.totals, **(old.totals if old else {})}
    return [
        Line(
            key=(label,),
            label=label,
            marks="",
            total=amounts.totals[label],
            rate=_rate(amounts.totals[label], old.totals[label] if old else None, seconds),
            nodes=tuple(amounts.by_node[label][nid] for nid in nodes),
        )
        for label in labels
    ]


def sorted_lines(lines: Iterable[Line], by: str, nodes: Sequence[int]) -> list[Line]:
    """
    Return lines in order, the largest first; by ``name``, in alphabetical order.

    :param by: ``name``, ``total``, ``rate``, or a node as ``node N``; a node that is not there
        counts as the total
    """
    sizes: Mapping[str, Callable[[Line], float | None]] = {
        "total": lambda line: line.total,
        "rate": lambda line: line.rate,
        **{f"node {nid}": _of_node(number) for number, nid in enumerate(nodes)},
    }
    if by == "name":
        return sorted(lines, key=lambda line: (line.label, line.key[1:]))
    size = sizes.get(by, sizes["total"])

    def order(line: Line) -> tuple[bool, float, float, str]:
        value = size(line)
        # Of lines that do not grow, the largest first.
        return value is None, -(value or 0), -(line.total or 0), line.label

    return sorted(lines, key=order)


def _of_node(number: int) -> Callable[[Line], float | None]:
    return lambda line: line.nodes[number]
