# SPDX-License-Identifier: LGPL-2.1-or-later
"""
References that a word on a stack may explain.

A word that an earlier call left on the stack of a task that sleeps can look like a reference to a
memcg, and the stack like a call that holds one. Which memcg has such a word differs from image to
image. So what is planted in a memcg of a test's choice may have to be more than a stack explains,
and what is about one reference needs a memcg that no such word is about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from memcg_inspect.report import Report, Row
from support.findings import named
from support.planters.css_refs import of_memcg
from support.planting import Subject

__all__ = ("check_is_found", "undoubted")

#: More than the stacks of all tasks explain.
_MANY = 100


def _row(report: Report, memcg: int) -> Row:
    [row] = [r for r in report.rows if (r.identity, r.memcg) == ("css_refs", memcg)]
    return row


def _check_by_stacks(row: Row, holders: int = 0) -> None:
    """Check that the reason of a row is more tasks than hold references."""
    reason = row.reason or ""
    assert re.search(r"a stack or register may point|at most \d+ references? of", reason), row
    assert len(re.findall(r"\(\d+\)", reason)) > holders, row


def check_is_found(subject: Subject, memcg: int, path: str, off: int, holders: int = 0) -> None:
    """
    Check that some references too many or too few are found, or many if stacks explain some.

    :param holders: number of tasks that hold references, which excuse as many as they hold
    """
    own = _row(subject.report, memcg).difference or 0
    report = subject.audit(of_memcg(subject, memcg, path, off))
    if (row := _row(report, memcg)).status != "differs":
        _check_by_stacks(row, holders)
        off *= _MANY
        report = subject.audit(of_memcg(subject, memcg, path, off))
    assert named(report, "css_refs") == {(path, None, "css.refcnt", own + off)}


def undoubted(subject: Subject, off: int, paths: Iterable[str]) -> str:
    """Return the first memcg in which some references too many or too few are found."""
    for path in paths:
        memcg = subject.paths[path]
        row = _row(subject.audit(of_memcg(subject, memcg, path, off)), memcg)
        if row.status == "differs":
            return path
        _check_by_stacks(row)
    raise AssertionError("a stack points to each memcg")
