# SPDX-License-Identifier: LGPL-2.1-or-later
"""How a row gets its status, the same for all identities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memcg_inspect.model import Identity, Row, RowStatus, Unit

__all__ = ("make_row", "summarize")


def make_row(
    identity: str,
    *,
    memcg: int | None,
    nid: int | None,
    item: str,
    unit: Unit,
    found: Mapping[str, int],
    claimed: Mapping[str, int] | None,
    objcg: int | None = None,
    missing: str | None = None,
    missing_hides_both: bool = False,
    unread: str | None = None,
    hierarchy: int | None = None,
) -> Row:
    """
    Judge one equation.

    :param missing: why charges may be missing from *found*, if they may. What is missing can
        only add to *found*, so more than is claimed is a finding all the same.
    :param missing_hides_both: what is missing may turn the difference either way
    :param unread: why *claimed* is ``None``
    """
    status: RowStatus
    reason = None
    if claimed is None:
        status, reason = "unverifiable", unread or "the counter could not be read"
    else:
        difference = sum(claimed.values()) - sum(found.values())
        if missing is not None and (difference >= 0 or missing_hides_both):
            status, reason = "unverifiable", missing
        else:
            status = "differs" if difference else "exact"
    return Row(
        identity=identity,
        memcg=memcg,
        objcg=objcg,
        nid=nid,
        item=item,
        unit=unit,
        status=status,
        found=found,
        claimed=claimed,
        reason=reason,
        hierarchy=hierarchy,
    )


def summarize(name: str, rows: Iterable[Row]) -> Identity:
    """Add the rows of an identity up to its outcome."""
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
