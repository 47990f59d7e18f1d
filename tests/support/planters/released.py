# SPDX-License-Identifier: LGPL-2.1-or-later
"""Faults that ``released`` must name."""

from __future__ import annotations

from memcg_inspect.collect.released import CSS_RELEASED
from support.planting import Fault, NoVictim, Planter, Subject


def forgotten(subject: Subject, _: int) -> Fault:
    """Take a removed memcg off the list of its siblings, and queue nothing that would free it."""
    memcgs = subject.snapshot.memcgs
    parents = {memcg.parent for memcg in memcgs.values()}
    for memcg in memcgs.values():
        if not memcg.offline or memcg.address in parents or not subject.may_change(memcg.path):
            continue
        css = subject.object("struct mem_cgroup *", memcg.address).css
        return Fault(
            (
                subject.put(css.sibling.prev.next, css.sibling.next.value_()),
                subject.put(css.sibling.next.prev, css.sibling.prev.value_()),
                subject.put(css.flags, int(css.flags) | CSS_RELEASED),
            ),
            (memcg.path,),
            {("?", None, "css", 1)},
        )
    raise NoVictim("no memcg was removed")


def never_released(subject: Subject, _: int) -> Fault:
    """Drop all references to a removed memcg without a call of css_release()."""
    memcgs = subject.snapshot.memcgs
    for memcg in memcgs.values():
        if memcg.offline and subject.may_change(memcg.path):
            css = subject.object("struct mem_cgroup *", memcg.address).css
            return Fault(
                (subject.put(css.refcnt.data.count, 0),), (memcg.path,), {("?", None, "css", 1)}
            )
    raise NoVictim("no memcg was removed")


PLANTERS = (
    Planter("what frees a memcg", forgotten),
    Planter("the last reference to a memcg", never_released),
)
