# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Charges of huge pages
---------------------

A huge page of hugetlb refers to the cgroup that is charged for it. The cgroup counts it twice: in
its page counter, and in the usage of the node. Rows tell which of these three is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Signature, View
from memcg_inspect.checks.hugetlb_charges import parent_item
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.model import counted

__all__ = ("CAUSES",)

_USAGE, _NODES = "hugetlb_usage", "hugetlb_nodes"
#: Rows that are tried as the other side of a charge.
_MOST = 8


def _charge(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    if key.identity == _NODES:
        yield _wrong(key, amount, "", {key: amount})
        for other in _others(view, key, amount):
            if other.item == key.item and amount > 0:
                rows = {key: amount, other: -amount}
                yield _wrong(key, amount, f"instead of on node {other.nid}", rows)
        return
    above = parent_item(view.snapshot.hugetlb, key.item)
    if above is not None:
        # That of the parent includes this one.
        parent = RowKey(_USAGE, above, key.unit)
        rows = {key: amount, parent: -amount}
        yield _wrong(key, amount, "in this page counter only", rows)
    yield _wrong(key, amount, "in all page counters from this one up", {key: amount})
    for node in _nodes(view, key, amount):
        rows = {key: amount, node: amount}
        yield _wrong(key._replace(nid=node.nid), amount, "in both counters", rows)


def _owner(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    if amount < 0:
        return  # the other row suggests it, too
    for other in _others(view, key, amount):
        rows = {key: amount, other: -amount}
        if not view.differences.keeps(_NODES):
            yield _moved(key, other, amount, None, rows)
        for node in _nodes(view, key, amount):
            thief = node._replace(item=_node_item(other))
            yield _moved(key, other, amount, node.nid, rows | {node: amount, thief: -amount})


def _others(view: View, key: RowKey, amount: int) -> list[RowKey]:
    """Return other rows of the same size that are off by as much in the other direction."""
    size = key.item.partition("[")[0]
    some = (other for other, off in view.residuals.items() if off == -amount)
    same = (o for o in some if o.identity == key.identity and o.item.partition("[")[0] == size)
    return list(islice(same, _MOST))


def _nodes(view: View, key: RowKey, amount: int) -> list[RowKey]:
    """Return the rows of nodes of the same cgroup and size that are off by as much."""
    some = (node for node, off in view.residuals.items() if off == amount)
    return [node for node in some if node.identity == _NODES and node.item == _node_item(key)]


def _node_item(key: RowKey) -> str:
    return key.item.replace(".usage[", ".numa_stat[", 1)


def _wrong(key: RowKey, amount: int, place: str, rows: dict[RowKey, int]) -> Hypothesis:
    return Hypothesis(
        "hugetlb-charge", (), (), key.nid, key.item, amount, key.unit, Signature(rows), place
    )


def _moved(
    key: RowKey, other: RowKey, amount: int, nid: int | None, rows: dict[RowKey, int]
) -> Hypothesis:
    return Hypothesis(
        "hugetlb-owner", (), (), nid, key.item, amount, key.unit, Signature(rows), other.item
    )


def _say_charge(h: Hypothesis) -> str:
    where = "" if h.nid is None else f" of node {h.nid}"
    if h.place.startswith("instead"):
        return f"{counted(h.amount, h.unit)} of {h.item} are counted on node {h.nid} {h.place}"
    too = f"{counted(abs(h.amount), h.unit)} too {'high' if h.amount > 0 else 'low'}"
    return f"{h.item}{where} is {too}" + (f", {h.place}" if h.place else "")


def _say_owner(h: Hypothesis) -> str:
    where = "" if h.nid is None else f" of node {h.nid}"
    what = f"{counted(h.amount, h.unit)} of huge pages{where}"
    return f"{what} that were charged to {h.item} refer to the cgroup of {h.place}"


CAUSES = (
    Cause(
        "hugetlb-owner",
        (_USAGE,),
        _owner,
        _say_owner,
        ("hugetlb_cgroup_commit_charge", "hugetlb_cgroup_migrate", "hugetlb_cgroup_css_offline"),
        "huge pages of hugetlb refer to another cgroup than the one that was charged",
    ),
    Cause(
        "hugetlb-charge",
        (_USAGE, _NODES),
        _charge,
        _say_charge,
        ("hugetlb_cgroup_charge_cgroup", "hugetlb_cgroup_uncharge_folio"),
        "the hugetlb controller counts more or less than the huge pages of a cgroup",
    ),
)
