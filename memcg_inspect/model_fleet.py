# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Results of many dumps
---------------------

What is kept of the audit of each of many dumps: a :class:`DumpResult`, which is a line of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, get_origin, get_type_hints

__all__ = ("DumpCause", "DumpResult", "parse_result")

R = TypeVar("R")


@dataclass(frozen=True)
class DumpCause:
    """
    A diagnosis.

    :ivar cause: name of the cause, e.g. ``object-owner``
    :ivar what: one sentence
    :ivar confidence: ``proved``, ``only-explanation`` or ``likely``
    :ivar memcg_paths: paths of the memcgs that it is about; ``None`` for one that has none
    :ivar node: ``None`` if it is not about one node
    :ivar amount: how much is wrong; ``None`` if that is not known
    :ivar unit: unit of :attr:`amount`
    :ivar findings: number of findings that it explains
    """

    cause: str
    what: str
    confidence: str
    memcg_paths: tuple[str | None, ...]
    node: int | None
    amount: int | None
    unit: str
    findings: int


@dataclass(frozen=True)
class DumpResult:
    """
    The result of the audit of one dump.

    :ivar dump: its absolute path
    :ivar bytes: size of the file; ``None`` if it cannot be seen
    :ivar mtime_ns: time at which it was last written, in nanoseconds since 1970; ``None`` if it
        cannot be seen
    :ivar status: exit status of the audit
    :ivar verdict: ``exact``, ``findings`` or ``incomplete``; ``None`` if there is no report
    :ivar error: why there is no report; ``None`` if there is one
    :ivar host: name of the machine; empty if it is not known
    :ivar release: release of the kernel; empty if it is not known
    :ivar memcgs: number of memcgs
    :ivar rows: number of rows that were judged
    :ivar findings: number of findings
    :ivar unexplained: number of findings that no cause explains
    :ivar unreadable: number of things that could not be read
    :ivar causes: the diagnoses
    :ivar seconds: time that the audit took
    """

    dump: str
    bytes: int | None
    mtime_ns: int | None
    status: int
    verdict: str | None
    error: str | None
    host: str = ""
    release: str = ""
    memcgs: int = 0
    rows: int = 0
    findings: int = 0
    unexplained: int = 0
    unreadable: int = 0
    causes: tuple[DumpCause, ...] = ()
    seconds: float = 0.0


def parse_result(document: Mapping[str, Any]) -> DumpResult:
    """
    Return the result that a line of JSON has. Fields that are not known are left out.

    :raises KeyError: if a field is missing
    :raises TypeError: if one has another type
    """
    causes = tuple(_record(DumpCause, cause) for cause in document["causes"])
    return _record(DumpResult, {**document, "causes": causes})


def _record(record: type[R], document: Mapping[str, Any]) -> R:
    values = {}
    for name, hint in get_type_hints(record).items():
        value, kind = document[name], get_origin(hint) or hint
        if kind is tuple:
            value = tuple(value)
            if record is DumpCause and not all(isinstance(v, str | None) for v in value):
                raise TypeError(f"{name} is {value!r}")
        elif kind is float:
            value = float(value)
        elif not isinstance(value, hint if kind is UnionType else kind):
            raise TypeError(f"{name} is {value!r}")
        values[name] = value
    return record(**values)
