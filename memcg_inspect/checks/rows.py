# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rows
----

How a row gets its status, and an identity its outcome. The rules are the same for all
identities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from memcg_inspect.checks.counters import CounterValue
from memcg_inspect.checks.snapshot import Snapshot, split
from memcg_inspect.model import Unit
from memcg_inspect.report import Finding, Identity, Row, RowStatus

__all__ = (
    "Missing",
    "RowKey",
    "counter_row",
    "doubt_released",
    "doubted",
    "finding_key",
    "make_row",
    "missing_if",
    "row_key",
    "summarize",
)


_NOTHING = CounterValue(0, 0)
_RELEASED = "memcgs that are being freed, which may hold references, are not all in the image"


class RowKey(NamedTuple):
    """
    What a row is about. No two rows of one report have the same key.

    :ivar identity: name of the identity
    :ivar item: name of the counter, as the kernel has it
    :ivar unit: of all amounts in the row
    :ivar memcg: ``struct mem_cgroup *``
    :ivar nid: node; ``None`` for a counter that is not kept by node
    :ivar objcg: ``struct obj_cgroup *``
    """

    identity: str
    item: str
    unit: Unit
    memcg: int | None = None
    nid: int | None = None
    objcg: int | None = None


class Missing(NamedTuple):
    """
    Why charges may be missing from what was found.

    :ivar reason: in words, for the report
    :ivar either_way: whether the difference may change in either direction. Otherwise what is
        missing can only add to what was found, so a row that found more than is claimed differs
        all the same.
    """

    reason: str
    either_way: bool = False


def row_key(row: Row) -> RowKey:
    """Return what a row is about."""
    return RowKey(row.identity, row.item, row.unit, row.memcg, row.nid, row.objcg)


def finding_key(finding: Finding) -> RowKey:
    """Return the key of the row that a finding is about, if there is one."""
    f = finding
    return RowKey(f.identity, f.item, f.unit, f.memcg, f.nid, f.objcg)


def make_row(
    key: RowKey,
    found: Mapping[str, int],
    claimed: Mapping[str, int] | None,
    missing: Missing | None = None,
    unread: str | None = None,
    hierarchy: int | None = None,
) -> Row:
    """
    Compare what was found with what is claimed.

    :param found: amounts by source
    :param claimed: amounts by place; ``None`` if the counter could not be read
    :param missing: why charges may be missing from *found*; ``None`` if none is
    :param unread: why *claimed* is ``None``
    :param hierarchy: the counter as its readers see it, descendants included
    """
    status: RowStatus
    reason = None
    if claimed is None:
        status, reason = "unverifiable", unread or "the counter could not be read"
    else:
        difference = sum(claimed.values()) - sum(found.values())
        if missing is not None and (difference >= 0 or missing.either_way):
            status, reason = "unverifiable", missing.reason
        else:
            status = "differs" if difference else "exact"
    return _row(key, status, found, claimed, reason, hierarchy)


def _row(
    key: RowKey,
    status: RowStatus,
    found: Mapping[str, int],
    claimed: Mapping[str, int] | None,
    reason: str | None = None,
    hierarchy: int | None = None,
) -> Row:
    identity, item, unit, memcg, nid, objcg = key
    return Row(identity, memcg, objcg, nid, item, unit, status, found, claimed, reason, hierarchy)


def counter_row(
    snapshot: Snapshot, key: RowKey, found: Mapping[str, int], missing: Missing | None = None
) -> Row:
    """Compare what was found with a memcg's own share of the counter that *key* names."""
    memcg, counters = key.memcg or 0, snapshot.counters
    if missing is None and counters.is_zero(memcg, key.item, key.nid) and not any(found.values()):
        return _row(key, "exact", found, split(_NOTHING), hierarchy=0)
    return make_row(
        key,
        found,
        snapshot.own(memcg, key.item, key.nid),
        missing,
        unread=snapshot.unread(memcg),
        hierarchy=snapshot.folded(memcg, key.item, key.nid),
    )


def doubted(row: Row, doubt: Missing | None) -> Row:
    """
    Return a row, ``unverifiable`` if it differs and what was found is doubtful.

    Unlike missing charges, a doubt does not change a row that is exact: most doubtful charges are
    as they were read.
    """
    if doubt is None or row.status != "differs":
        return row
    if row.off < 0 and not doubt.either_way:
        return row
    return replace(row, status="unverifiable", reason=doubt.reason)


def doubt_released(snapshot: Snapshot, row: Row) -> Row:
    """
    Return a row of references, ``unverifiable`` if memcgs that are being freed may hold the others.

    :param row: each of them holds at most one reference that it counts
    """
    unread = snapshot.coverage.get("released")
    if unread is None or row.status != "differs" or row.off > unread.unreadable:
        return row
    return doubted(row, Missing(_RELEASED))


def missing_if(reason: str | None, either_way: bool = False) -> Missing | None:
    """Return what a reason says is missing; ``None`` if there is no reason."""
    return None if reason is None else Missing(reason, either_way)


def summarize(name: str, rows: Iterable[Row]) -> Identity:
    """Return the outcome of an identity: that of its worst row."""
    rows = list(rows)
    by_status = {row.status for row in rows}
    differing = sum(row.status == "differs" for row in rows)
    reason = next((row.reason for row in rows if row.status == "unverifiable"), None)
    if differing:
        return Identity(name, "findings", len(rows), differing)
    if "unverifiable" in by_status:
        return Identity(name, "unverifiable", len(rows), 0, reason)
    if "moving" in by_status:
        return Identity(name, "moving", len(rows), 0)
    return Identity(name, "exact", len(rows), 0)
