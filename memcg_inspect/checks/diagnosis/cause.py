# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Definition of a cause
---------------------

Each kind of fault is a :class:`Cause`: its name, how it is recognized from a row that differs, its
wording, and the functions of the kernel that can make it. A :class:`Hypothesis` is one such fault
with its memcgs and amount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memcg_inspect.checks.diagnosis.differences import Signature, View
from memcg_inspect.checks.diagnosis.effects import Charge
from memcg_inspect.checks.rows import RowKey
from memcg_inspect.model import Unit

__all__ = ("Cause", "Hypothesis")


class Hypothesis(NamedTuple):
    """
    One fault that may explain rows.

    :ivar cause: name of its :class:`Cause`
    :ivar memcgs: ``struct mem_cgroup *`` of the memcgs that it concerns; of a charge with another
        owner, first the one that it was counted for
    :ivar objcgs: ``struct obj_cgroup *`` likewise; ``None`` if it is not known
    :ivar nid: node; ``None`` for none
    :ivar item: counter, or kind of charge
    :ivar amount: how much is wrong
    :ivar unit: unit of the amount
    :ivar signature: what it adds to rows
    :ivar place: details that its wording needs
    :ivar charge: the charge, if it is about one
    :ivar findings: findings that prove it, by their index
    """

    cause: str
    memcgs: tuple[int, ...]
    objcgs: tuple[int | None, ...]
    nid: int | None
    item: str
    amount: int
    unit: Unit
    signature: Signature
    place: str = ""
    charge: Charge | None = None
    findings: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other hypotheses."""
        return self[:7] + (self.place, self.charge)


@dataclass(frozen=True)
class Cause:
    """
    One kind of fault.

    :ivar name: name in reports
    :ivar rows: identities whose rows it is recognized from
    :ivar options: returns the faults of this kind that add exactly an amount to a row
    :ivar sentence: returns a fault in one sentence, without paths of memcgs
    :ivar functions: functions of the kernel that can make it
    :ivar functions_by_item: those of some items, in place of :attr:`functions`
    :ivar meaning: for the list in ``docs/output.md`` (Markdown)
    """

    name: str
    rows: tuple[str, ...]
    options: Callable[[View, RowKey, int], Iterable[Hypothesis]]
    sentence: Callable[[Hypothesis], str]
    functions: tuple[str, ...]
    meaning: str
    functions_by_item: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
