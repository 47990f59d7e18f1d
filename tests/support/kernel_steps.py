# SPDX-License-Identifier: LGPL-2.1-or-later
"""
The kernel's own steps of charging memory, done to an image.

A fault in how memory is charged is one of these steps too many, too few, or done to the wrong
counter. So a planter that is made of them changes all the memory that such a kernel would have
changed, and knows nothing of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from drgn import Object
from drgn.helpers.linux.mmzone import NODE_DATA

from memcg_inspect.linux.mm.memcontrol_vmstats import StatReader
from memcg_inspect.linux.mm.page_counter import page_counters
from support.planting import Subject, Write


def ancestry(subject: Subject, path: str) -> Iterator[Object]:
    """Yield a memcg and its ancestors."""
    address: int | None = subject.paths[path]
    while address is not None:
        yield subject.object("struct mem_cgroup *", address)
        address = subject.snapshot.memcgs[address].parent


class Steps:
    """
    Steps to write at once. Several may change the same word.

    :param subject: the image
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._things: dict[int, Object] = {}
        self._added: dict[int, int] = {}

    def add(self, thing: Object, amount: int) -> None:
        """Add to an integer, an atomic, or the like."""
        self._things[thing.address_] = thing
        self._added[thing.address_] = self._added.get(thing.address_, 0) + amount

    def writes(self) -> tuple[Write, ...]:
        """Return what the steps write."""
        things = self._things.items()
        return tuple(self.subject.add(thing, self._added[at]) for at, thing in things)

    def count(self, path: str, item: str, amount: int, nid: int | None = None) -> None:
        """Do ``mod_memcg_state()``, or with a node ``mod_memcg_lruvec_state()``, on one CPU."""
        for where in {None, nid}:
            self.add(self.subject.percpu_counter(path, item, where), amount)

    def fold(self, path: str, item: str, amount: int, nid: int | None = None) -> None:
        """Do what ``mem_cgroup_stat_aggregate()`` does with what a CPU changed, at all levels."""
        self._fold(path, item, amount, nid, above_only=False)

    def fold_of_child(self, path: str, item: str, amount: int, nid: int | None = None) -> None:
        """Do what ``mem_cgroup_stat_aggregate()`` does with what a child handed up."""
        self._fold(path, item, amount, nid, above_only=True)

    def _fold(self, path: str, item: str, amount: int, nid: int | None, above_only: bool) -> None:
        slot = StatReader(self.subject.image, [item]).slots[item]
        for where in {None, nid}:
            for number, memcg in enumerate(ancestry(self.subject, path)):
                stats = memcg.vmstats if where is None else memcg.nodeinfo[where].lruvec_stats
                self.add(stats.state[slot], amount)
                if number == 0 and not above_only and self.subject.snapshot.features.has_local:
                    self.add(stats.state_local[slot], amount)

    def charge_pages(self, path: str, pages: int, nid: int) -> None:
        """Do ``obj_cgroup_charge_pages()``."""
        subject = self.subject
        item = subject.item("NR_KMEM", "MEMCG_KMEM")
        if item.startswith("NR_"):
            self.count(path, item, pages, nid)
            number = int(subject.prog[item])
            self.add(NODE_DATA(subject.prog, nid).vm_stat[number], pages)
            self.add(subject.prog["vm_node_stat"][number], pages)
        else:
            self.count(path, item, pages)
        for memcg in ancestry(subject, path):
            for name in page_counters(subject.image):
                if name in ("memory", "kmem"):
                    self.add(memcg.member_(name).usage, pages)

    def charge_bytes(self, objcg: int, size: int, nid: int) -> None:
        """Do ``obj_cgroup_charge()``, or with a size below 0 ``obj_cgroup_uncharge()``."""
        subject, page = self.subject, self.subject.snapshot.image.page_size
        left = subject.object("struct obj_cgroup *", objcg).nr_charged_bytes
        # Whole pages are charged if too few bytes are left, and uncharged if there are more.
        rest = int(left.counter) - size
        pages = -(rest // page)
        if pages:
            self.charge_pages(subject.path(objcg), pages, nid)
        self.add(left, pages * page - size)

    def refer(self, objcg: int, number: int) -> None:
        """Do ``obj_cgroup_get_many()``."""
        refs = self.subject.object("struct obj_cgroup *", objcg).refcnt.data.count
        self.add(refs, number)
