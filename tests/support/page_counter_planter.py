# SPDX-License-Identifier: LGPL-2.1-or-later
"""A planter of faults in page counters."""

from __future__ import annotations

from memcg_inspect.linux.mm.page_counter import page_counters
from support.planting import Fault, Planter, Subject


def page_counter(names: tuple[str, ...], sizes: tuple[int, ...]) -> Planter:
    """Return a planter that adds to the first of these page counters that is in use."""

    def plant(subject: Subject, size: int) -> Fault:
        name = next(n for n in names if n in page_counters(subject.image))
        path = subject.victims()[0]
        counter = subject.memcg(path).member_(name).usage
        above = path.rpartition("/")[0] or "/"
        item = f"{name}.usage"
        # The parent's own share is its counter less this one.
        named = {(path, None, item, size), (above, None, item, -size)}
        return Fault((subject.add(counter, size),), (path, above), named)

    return Planter(f"the page counter {' or '.join(names)}", plant, sizes)
