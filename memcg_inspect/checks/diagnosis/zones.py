# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Counters of zones
-----------------

A counter of a zone is in three places: ``vm_stat`` of the zone, what CPUs have not added yet, and
the total of all zones. Rows tell which one is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Signature, View
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.checks.zone_pages import counters_of
from memcg_inspect.model import counted

__all__ = ("CAUSES",)

_ZONES = ("zone_free", "zone_zspages", "zone_mlock", "zone_lru")
_LISTS, _TOTALS = "zone_free_area", "zone_totals"


def _zone_counter(view: View, key: RowKey, amount: int) -> Iterator[Hypothesis]:
    if key.identity == _TOTALS:
        yield _wrong(key, amount, "the total of all zones", {key: amount})
        # No other row may compare the counter of a zone.
        others = [k for k in view.residuals if k.identity in _ZONES and key.item in _items(k)]
        for other in others:
            rows = {other: -amount, key: amount}
            yield _wrong(other, -amount, "the value of the zone", rows)
        if not others:
            yield _wrong(key, -amount, "the value of a zone", {key: amount})
        return
    if key.identity == _LISTS:
        yield _wrong(key, amount, "the number of blocks on the list", {key: amount})
        of_type = [k for k in view.residuals if k.identity == "zone_free" and _is_same_zone(k, key)]
        for other in of_type:
            yield _wrong(other, amount, "the type of pages", {key: amount, other: amount})
        return
    yield _wrong(key, amount, "a CPU's changes", {key: amount})
    for item in _items(key):
        totals = RowKey(_TOTALS, item, key.unit)
        if view.differences.applies(totals):
            rows = {key: amount, totals: -amount}
            yield _wrong(key, amount, "the value of the zone", rows)


def _items(key: RowKey) -> tuple[str, ...]:
    return counters_of(key.item)


def _is_same_zone(key: RowKey, other: RowKey) -> bool:
    zone, of = (k.item.partition("[")[2].partition("]")[0] for k in (key, other))
    return (zone, key.nid) == (of, other.nid)


def _wrong(key: RowKey, amount: int, place: str, rows: dict[RowKey, int]) -> Hypothesis:
    return Hypothesis(
        "zone-counter", (), (), key.nid, key.item, amount, key.unit, Signature(rows), place
    )


def _say(h: Hypothesis) -> str:
    where = "" if h.nid is None else f" of node {h.nid}"
    too = f"{counted(abs(h.amount), h.unit)} too {'high' if h.amount > 0 else 'low'}"
    return f"{h.item}{where} is {too}, in {h.place}"


CAUSES = (
    Cause(
        "zone-counter",
        (*_ZONES, _LISTS, _TOTALS),
        _zone_counter,
        _say,
        ("__mod_zone_page_state", "refresh_cpu_vm_stats", "zone_page_state_add"),
        "a counter of a zone, or the number of blocks on a list of free pages, is wrong",
    ),
)
