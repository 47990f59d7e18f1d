# SPDX-License-Identifier: LGPL-2.1-or-later
"""Causes and rows that are made for tests of the search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memcg_inspect.checks.diagnosis.cause import Cause, Hypothesis
from memcg_inspect.checks.diagnosis.differences import Signature, View
from memcg_inspect.checks.diagnosis.search import Explanation, explain
from memcg_inspect.checks.rows import RowKey
from support.made import snapshot
from support.made_rows import Short, key, view

#: Rows of one memcg each, that differ by more than by coincidence.
ROWS: list[Short] = [("css_refs", "css.refcnt", 0x9000 + n) for n in range(9)]


def fault(name: str, rows: Mapping[Short, int], **known: Any) -> Hypothesis:
    """Return a fault that adds amounts to rows."""
    first = {"memcgs": (), "objcgs": (), "nid": None, "item": name, "unit": "references"}
    signature = Signature({key(*short): amount for short, amount in rows.items()})
    amount = next(iter(rows.values()))
    return Hypothesis(name, **{**first, "amount": amount, "signature": signature, **known})


def causes(*faults: Hypothesis) -> list[Cause]:
    """Return a cause for each name, which is recognized from each row that its faults change."""

    def cause(name: str) -> Cause:
        def options(rows: View, row: RowKey, amount: int) -> Iterator[Hypothesis]:
            yield from (f for f in faults if f.cause == name and row in f.signature.rows)

        identities = tuple({row.identity for f in faults for row in f.signature.rows})
        return Cause(name, identities, options, str, (), "")

    return [cause(name) for name in dict.fromkeys(f.cause for f in faults)]


def found(
    off: Mapping[Short, int], *faults: Hypothesis, exact: Sequence[Short] = (), **more: Any
) -> list[Explanation]:
    differences = view(snapshot(), dict(off), exact).differences
    return explain(differences, causes(*faults), **more)


def names(some: Sequence[Explanation]) -> list[str]:
    return sorted(e.cause.cause for e in some)
