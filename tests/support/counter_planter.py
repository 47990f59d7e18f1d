# SPDX-License-Identifier: LGPL-2.1-or-later
"""A planter that most identities have: a counter of a CPU that has not been folded yet."""

from __future__ import annotations

from memcg_inspect.checks.ledger import ChargeKind
from support.planting import Fault, NoVictim, Planter, Subject


def counter(
    kind: ChargeKind,
    detail: str | None,
    items: tuple[str, ...],
    sizes: tuple[int, ...],
    *,
    of_any: bool = False,
) -> Planter:
    """
    Return a planter that adds to the first of these counters that the kernel has.

    :param kind: memory that the victim has, so that its row is not empty
    :param items: counters of lruvecs (``NR_*``) are changed on the node of that memory
    :param of_any: whether any memcg is a victim if none has such memory
    """

    def plant(subject: Subject, size: int) -> Fault:
        item = subject.item(*items)
        try:
            path, nid = subject.largest(kind, detail)
        except NoVictim:
            if not of_any:
                raise
            path, nid = subject.victims()[0], subject.report.image.nodes[0]
        where = nid if item.startswith("NR_") else None
        write = subject.add(subject.percpu_counter(path, item, where), size)
        return Fault((write,), (path,), {(path, where, item, size)})

    return Planter(f"a CPU's part of {' or '.join(items)}", plant, sizes)
