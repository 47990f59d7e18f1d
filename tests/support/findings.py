# SPDX-License-Identifier: LGPL-2.1-or-later
"""What the findings of a report are about."""

from __future__ import annotations

from memcg_inspect.report import Report


def by_path(report: Report) -> dict[str, int]:
    return {m.path: m.address for m in report.memcgs if m.state == "online"}


def named(report: Report, identity: str = "slab") -> set[tuple[str, int | None, str, int | None]]:
    """Return (memcg, node, item, difference) of each finding of an identity."""
    paths = {m.address: m.path for m in report.memcgs}
    return {
        (paths.get(f.memcg or 0, "?"), f.nid, f.item, f.difference)
        for f in report.findings
        if f.identity == identity
    }


def lost_updates(report: Report) -> set[str]:
    """
    Return the memcgs that a CPU of the guest has changed without a list to fold the change from.

    That is legal while it is rare. If a fault is planted in the counter of a CPU, that is one such
    change more, and all of them may be findings of ``updated``.
    """
    paths = {m.address: m.path for m in report.memcgs}
    return {paths[row.memcg or 0] for row in report.rows if "lost" in row.found}


def touched(report: Report, *paths: str) -> bool:
    """Return whether every finding is on one of these memcgs or on an ancestor of one."""
    allowed = set()
    for path in paths:
        parts = path.strip("/").split("/")
        allowed |= {"/" + "/".join(parts[:n]) for n in range(len(parts) + 1)}
    names = {m.address: m.path for m in report.memcgs}
    return all(f.memcg is None or names[f.memcg] in allowed for f in report.findings)
