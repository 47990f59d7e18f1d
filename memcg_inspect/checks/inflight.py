# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Rows in flight
--------------

A crash, or stopping a machine, stops each CPU at any point. A CPU may have booked one charge in
one place and not yet in another. A row that differs is ``in-flight``, and not a finding, if CPUs
were in functions that make such charges, and the difference is no more than one charge for each of
those CPUs. An identity may have other explanations
(:attr:`memcg_inspect.checks.check.Check.explain`).

If all CPUs were idle, no charge was half done, and differences are not explained this way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memcg_inspect.checks.registry import check_of
from memcg_inspect.checks.snapshot import Snapshot
from memcg_inspect.model import Running, counted
from memcg_inspect.report import Row

__all__ = ("mark_in_flight",)

#: The least number of frames of a stack that could be unwound.
_UNWOUND = 3


def mark_in_flight(snapshot: Snapshot, rows: Sequence[Row]) -> list[Row]:
    """Return the rows; those that half-done charges may explain are ``in-flight``."""
    marked = [_explained(snapshot, row) for row in rows]
    busy = [cpu for cpu in snapshot.running if cpu.busy]
    if not busy:
        return marked
    differing = Counter(row.identity for row in marked if row.status == "differs")
    return [_half_done(snapshot, row, busy, differing[row.identity]) for row in marked]


def _explained(snapshot: Snapshot, row: Row) -> Row:
    explain = check_of(row).explain
    reason = explain(snapshot, row) if explain is not None and row.status == "differs" else None
    return row if reason is None else _in_flight(row, reason)


def _half_done(snapshot: Snapshot, row: Row, busy: Sequence[Running], differing: int) -> Row:
    """:param differing: how many rows of the same identity differ"""
    half_done = check_of(row).half_done
    if row.status != "differs" or half_done is None:
        return row
    functions = half_done.functions
    cpus = [cpu for cpu in busy if any(map(functions.search, cpu.functions))]
    # If registers or the stack are not in the image, the CPU may have been in any function.
    cpus += [cpu for cpu in busy if len(cpu.functions) < _UNWOUND and cpu not in cpus]
    if differing > 2 * len(cpus) and not half_done.in_many_rows:
        return row
    unit = snapshot.image.page_size if row.unit == "bytes" and half_done.in_pages else 1
    most = [half_done.largest(snapshot, cpu) * unit for cpu in cpus]
    if not cpus or abs(row.difference or 0) > sum(most):
        return row
    return _in_flight(
        row,
        "; ".join(
            f"at most {counted(number, row.unit)} of {_where(cpu, functions)}"
            for number, cpu in zip(most, cpus, strict=True)
        ),
    )


def _where(cpu: Running, functions: re.Pattern[str]) -> str:
    known = [f for f in cpu.functions if functions.search(f)] or [*cpu.functions, "unknown place"]
    return f"CPU {cpu.cpu} ({cpu.comm}, {cpu.pid}), in {known[0]}"


def _in_flight(row: Row, reason: str) -> Row:
    return replace(row, status="in-flight", reason=reason)
